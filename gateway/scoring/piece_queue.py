"""A model's slots for pieces of long lists: in turn between tenants, and a quarter is left to short requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

from gateway.embeddings.fair import Lane
from gateway.embeddings.part import Part
from gateway.embeddings.sizes import ModelSizes


class PieceTurns:
    """The pieces of one list: iterating gives each when its slots are taken; `ended` gives them back."""

    def __init__(self, room: "PieceQueue", pieces: int) -> None:
        self._room = room
        self._due: asyncio.Queue[Part] = asyncio.Queue()
        self._left = pieces
        self._holds: set[Part] = set()

    async def __aiter__(self) -> AsyncIterator[Part]:
        while self._left:
            self._left -= 1
            yield await self._due.get()

    def come(self, part: Part) -> None:
        """Its slots have been taken for it."""
        self._holds.add(part)
        self._due.put_nowait(part)

    def ended(self, part: Part) -> None:
        """A piece needs its slots no more. Safe to call again."""
        if part in self._holds:
            self._holds.remove(part)
            self._room.give_back(part.items)

    def end(self) -> None:
        """None of its pieces needs its slots any more."""
        held, self._holds = self._holds, set()
        if held:
            self._room.give_back(sum(part.items for part in held))


class PieceQueue:
    """Owner of the pieces of one model that wait to be sent, or are under way.

    `follow` brings the sizes up to date. What engines may be given now counts, not what they could be given: a piece
    that waits behind others of its own list must wait here, because `max_wait_seconds` does not count here.
    """

    def __init__(self, sizes: ModelSizes, clock: Callable[[], float], follow: Callable[[], None]) -> None:
        self._sizes = sizes
        self._clock = clock
        self._follow = follow
        self._lane = Lane()

    def __repr__(self) -> str:
        return f"<PieceQueue {self._sizes.bulk!r}, {self._lane!r}>"

    @property
    def busy(self) -> int:
        """Pieces that wait, and documents under way."""
        return len(self._lane) + self._sizes.bulk.items

    @property
    def next_items(self) -> int:
        """Documents of the piece that comes next; 0 if none waits."""
        return self._lane.next_items

    @contextmanager
    def turns(self, parts: Sequence[Part]) -> Iterator[PieceTurns]:
        """Have the pieces of one list wait for their turns; with the block, all that they wait for or hold ends."""
        turns, now = PieceTurns(self, len(parts)), self._clock()
        for part in parts:
            part.owner = turns
            self._lane.join(part, now)
        try:
            self.look()
            yield turns
        finally:
            for part in parts:
                self._lane.leave(part)
            turns.end()
            self.look_soon()

    def give_back(self, items: int) -> None:
        """Slots come free."""
        self._sizes.bulk.give_back(items)  # which has all look

    @property
    def _share(self) -> int:
        """Slots that pieces may take now."""
        return self._sizes.total_limit - self._sizes.total_limit // 4

    def look_soon(self) -> None:
        """Look at the end of this turn of the loop, as others do: they would always be later."""
        asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Let those go for whom there is room now; one may always."""
        sizes, lane = self._sizes, self._lane
        if len(lane):
            self._follow()
        while len(lane) and sizes.bulk.may_take(lane.next_items, self._share):
            for part in lane.take(1, 1):
                sizes.bulk.take(part.items)
                part.owner.come(part)
