"""Sessions and cache keys that clients name: a hint where to go when nothing else decides."""

from collections import OrderedDict
from collections.abc import Sequence

from gateway.routing.seat import Option, Seat

_MAX_HINTS = 65536
_WORTH = 0.2  # of the request's own prefill there: less than another prefill ahead


class Affinity:
    """Remembers where each hint was last sent."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, int] = OrderedDict()

    def favour(self, hint: int, options: Sequence[Option]) -> None:
        """Make the engine that had the hint last a little cheaper, if none is known to hold more of the prompt."""
        index = self._last.get(hint)
        if index is None:
            return
        most = max([option.hit_tokens for option in options], default=0)
        for option in options:
            if option.seat.index == index and option.hit_tokens == most:
                option.cost -= _WORTH * option.prefill_seconds

    def placed(self, hint: int, seat: Seat) -> None:
        """A request with this hint was sent there."""
        self._last[hint] = seat.index
        self._last.move_to_end(hint)
        if len(self._last) > _MAX_HINTS:
            self._last.popitem(last=False)
