"""What round robin would have had in the cache: the yardstick for what routing saves.

Under round robin all engines fare alike, so one of them is followed, and what it finds counts for each. It is measured
in steps of two blocks and rounded up: what routing saves is not overstated, and costs little to know.
"""

from collections.abc import Sequence
from operator import attrgetter

from gateway.request import Ask
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.seat import Seat

_EVERY = 2
_index = attrgetter("index")


class Shadow:
    """Sends each request, in thought only, to the engines in turn, and keeps a record of what the first would hold."""

    def __init__(self, max_blocks: int) -> None:
        self._record = PrefixIndex((), max_blocks)
        self._turns: dict[str, int] = {}  # requests so far, by model

    def resize(self, engine: int, capacity_bytes: int) -> None:
        """An engine's KV cache is as large as this."""
        self._record.resize(engine, capacity_bytes)

    def next(self, model: str, seats: Sequence[Seat]) -> Seat:
        """Whose turn it is: the next one by number."""
        return sorted(seats, key=_index)[self._turns.get(model, 0) % len(seats)]

    def hit_tokens(self, ask: Ask, seats: Sequence[Seat]) -> int:
        """The prompt tokens that round robin would have found in the cache, now that this request is over.

        Told for all engines together, whenever it is the first one's turn.
        """
        turn = self._turns.get(ask.model, 0)
        self._turns[ask.model] = turn + 1
        if turn % len(seats):
            return 0
        seat, keys = min(seats, key=_index), ask.keys[_EVERY - 1 :: _EVERY]
        depth = self._record.depths(keys)[seat.index]
        self._record.record(seat.index, keys, ask.edges[_EVERY - 1 :: _EVERY])
        if not depth or not ask.reads_cache or not seat.caches_prefixes:
            return 0
        held = ask.tokens_of(min(len(ask.keys), (depth + 1) * _EVERY))
        return min(held, ask.prompt_tokens - 1) // seat.block_tokens * seat.block_tokens * len(seats)
