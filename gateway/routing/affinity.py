"""Sessions and cache keys that clients name: a hint where to go when nothing else decides."""

from collections import OrderedDict
from collections.abc import Sequence

from gateway.routing.seat import Option, Seat

_MAX_HINTS = 65536
WORTH = 0.2  # of the request's own prefill there: less than another prefill ahead


class Affinity:
    """Remembers where each hint was last sent."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, int] = OrderedDict()

    def favour(self, hint: int, options: Sequence[Option]) -> None:
        """Make the engine that had the hint last a little cheaper, if none is known to hold more of the prompt."""
        at = self.favoured(hint, [option.seat for option in options], [option.hit_tokens for option in options])
        if at is not None:
            options[at].cost -= WORTH * options[at].prefill_seconds

    def favoured(self, hint: int, seats: Sequence[Seat], hit_tokens: Sequence[float]) -> int | None:
        """The place of that engine among these."""
        index = self._last.get(hint)
        at = next((at for at, seat in enumerate(seats) if seat.index == index), None)
        return at if at is not None and hit_tokens[at] == max(hit_tokens) else None

    def placed(self, hint: int, seat: Seat) -> None:
        """A request with this hint was sent there."""
        self._last[hint] = seat.index
        self._last.move_to_end(hint)
        if len(self._last) > _MAX_HINTS:
            self._last.popitem(last=False)
