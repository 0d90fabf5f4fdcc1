"""What round robin would have had in the cache: the yardstick for what routing saves."""

from collections.abc import Callable, Sequence

from gateway.request import Ask, Usage
from gateway.routing.hits import Hits
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.seat import Seat
from gateway.routing.trust import Trust


class Shadow:
    """Sends each request, in thought only, to the engines in turn, and keeps a record of what they would hold."""

    def __init__(self, capacity_bytes: Callable[[Seat], int], max_blocks: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._index = PrefixIndex((), max_blocks)
        self._hits = Hits(self._index, Trust())
        self._last: dict[str, int] = {}  # the engine that had the last turn, by model

    def next(self, model: str, seats: Sequence[Seat]) -> Seat:
        """Whose turn it is: the next one by number."""
        last = self._last.get(model, -1)
        return min(seats, key=lambda seat: (seat.index <= last, seat.index))

    def hit_tokens(self, ask: Ask, seats: Sequence[Seat], usage: Usage | None = None) -> int:
        """The prompt tokens that round robin would have found in the cache, now that this request is over."""
        seat = self.next(ask.model, seats)
        self._last[ask.model] = seat.index
        self._index.resize(seat.index, self._capacity_bytes(seat))
        [found] = self._hits.of(ask, [seat])
        self._hits.placed(ask, seat)
        if usage is not None and ask.sequences == 1 and usage.prompt_tokens > 0 and usage.completion_tokens > 1:
            size_bytes = usage.completion_tokens * ask.prompt_size // usage.prompt_tokens
            self._index.record_answer(seat.index, ask.keys[-1], size_bytes)
        return found
