"""Log lines about the same thing, not more often than somebody wants to read them."""

import math
from collections.abc import Callable, Hashable

_SECONDS = 60.0


class LogThrottle:
    """Tells of each thing once a minute at most; metrics tell the rest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_seconds: dict[Hashable, float] = {}

    def tells(self, thing: Hashable) -> bool:
        """Whether it is time to tell of it; if so, it counts as told."""
        now = self._clock()
        if now - self._told_seconds.get(thing, -math.inf) < _SECONDS:
            return False
        self._told_seconds[thing] = now
        return True
