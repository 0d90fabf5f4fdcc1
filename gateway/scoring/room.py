"""A model's slots for pieces of long lists: in turn between tenants, and a quarter is left to short requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.embeddings.fair import Lane
from gateway.embeddings.part import Part
from gateway.embeddings.sizes import ModelSizes


class Room:
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
        return f"<Room {self._sizes.bulk_items} of {self._share} taken, {self._lane!r}>"

    @property
    def busy(self) -> int:
        """Pieces that wait, and documents under way."""
        return len(self._lane) + self._sizes.bulk_items

    @asynccontextmanager
    async def place(self, part: Part) -> AsyncIterator[None]:
        """Wait until the piece may be sent, and hold its slots while the block runs."""
        part.owner = turn = asyncio.get_running_loop().create_future()
        self._lane.join(part, self._clock())
        self._look()
        try:
            await turn
            yield
        finally:
            if not self._lane.leave(part):
                self._sizes.bulk_items -= part.items
            self._look()

    @property
    def _share(self) -> int:
        """Slots that pieces may take now."""
        return self._sizes.total_limit - self._sizes.total_limit // 4

    def _look(self) -> None:
        """Let those go who have room now; one may always."""
        sizes, lane = self._sizes, self._lane
        if len(lane):
            self._follow()
        while len(lane) and (not sizes.bulk_items or sizes.bulk_items + lane.next_items <= self._share):
            for part in lane.take(1, 1):
                sizes.bulk_items += part.items
                if not part.owner.done():  # its client may be leaving just now
                    part.owner.set_result(None)
