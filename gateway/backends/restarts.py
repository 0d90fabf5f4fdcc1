"""Whether another process at a backend's URL is a restart, or one of several engines behind it, as behind a Service."""

from collections import deque
from typing import Final

_CLOCK_SECONDS: Final = 1.0  # by which the start of one process may differ between two readings
_APART_SECONDS: Final = 60.0  # no engine restarts three times within this time
_SETTLED_SECONDS: Final = 600.0  # with one process: the others are gone


class RestartEvidence:
    """What is known of the processes at one URL. With several of them, none of their changes is a restart."""

    def __init__(self) -> None:
        self.several = False
        self._changes: deque[float] = deque(maxlen=3)  # when another process answered, the last few times

    def is_restart(self, before: float | None, start: float | None, now: float) -> bool:
        """Whether a process that differs from the one before has replaced it; both by their start, None = unknown."""
        changes = self._changes
        if changes and now - changes[-1] > _SETTLED_SECONDS:
            self.several = False
        changes.append(now)
        if before is None or start is None:
            self.several |= len(changes) == changes.maxlen and now - changes[0] < _APART_SECONDS
        else:
            self.several |= start < before - _CLOCK_SECONDS
        return not self.several
