"""What round robin would have had in the cache: the yardstick for what routing saves.

It is measured in steps of two blocks and rounded up: what routing saves is never overstated, and costs little to know.
"""

from collections.abc import Sequence

from gateway.request import Ask
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.seat import Seat

_EVERY = 2


class Shadow:
    """Sends each request, in thought only, to the engines in turn, and keeps a record of what they would hold."""

    def __init__(self, max_blocks: int) -> None:
        self._index = PrefixIndex((), max_blocks)
        self._last: dict[str, int] = {}  # the engine that had the last turn, by model

    def resize(self, engine: int, capacity_bytes: int) -> None:
        """An engine's KV cache is as large as this."""
        self._index.resize(engine, capacity_bytes)

    def next(self, model: str, seats: Sequence[Seat]) -> Seat:
        """Whose turn it is: the next one by number."""
        last = self._last.get(model, -1)
        return min(seats, key=lambda seat: (seat.index <= last, seat.index))

    def hit_tokens(self, ask: Ask, seats: Sequence[Seat]) -> int:
        """The prompt tokens that round robin would have found in the cache, now that this request is over."""
        seat = self.next(ask.model, seats)
        self._last[ask.model] = seat.index
        keys = ask.keys[_EVERY - 1 :: _EVERY]
        depth = self._index.depths(keys)[seat.index]
        self._index.record(seat.index, keys, ask.edges[_EVERY - 1 :: _EVERY])
        if not depth or not ask.reads_cache or not seat.caches_prefixes:
            return 0
        held = ask.tokens_of(min(len(ask.keys), (depth + 1) * _EVERY))
        return min(held, ask.prompt_tokens - 1) // seat.block_tokens * seat.block_tokens
