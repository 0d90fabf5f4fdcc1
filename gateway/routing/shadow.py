"""What round robin would have had in the cache: the yardstick for what routing saves."""

from collections.abc import Callable, Sequence

from gateway.request import Ask
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.seat import Seat


class Shadow:
    """Sends each request, in thought only, to the engines in turn, and keeps a record of what they would hold."""

    def __init__(self, capacity_bytes: Callable[[Seat], int], max_blocks: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._index = PrefixIndex((), max_blocks)
        self._last: dict[str, int] = {}  # the engine that had the last turn, by model

    def next(self, model: str, seats: Sequence[Seat]) -> Seat:
        """Whose turn it is; `seats` in order of their numbers."""
        last = self._last.get(model, -1)
        return next((seat for seat in seats if seat.index > last), seats[0])

    def hit_tokens(self, ask: Ask, seats: Sequence[Seat]) -> int:
        """The prompt tokens that round robin would have found in the cache, now that this request is over."""
        seat = self.next(ask.model, seats)
        self._last[ask.model] = seat.index
        self._index.resize(seat.index, self._capacity_bytes(seat))
        depth = self._index.depths(ask.keys)[seat.index]
        self._index.record(seat.index, ask.keys, ask.edges)
        most = ask.prompt_tokens - 1
        return min(ask.tokens_of(depth), most) // seat.block_tokens * seat.block_tokens
