"""How many lines of all batches are in flight: a bound that batches share in turn."""

import asyncio
from collections import deque


class Slots:
    """Gives slots in the order in which they are requested: batches that always want one more take turns."""

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<Slots {self.taken} of {self._limit} taken, {len(self._waiting)} wait>"

    def apply(self, limit: int) -> None:
        """Take over another limit; what is taken stays taken."""
        self._limit = limit
        self._grant()

    async def acquire(self) -> None:
        """Take a slot, when one is free; `release` gives it back."""
        if self.taken < self._limit and not self._waiting:
            self.taken += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # granted in the same turn
            raise

    def release(self) -> None:
        self.taken -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.taken < self._limit:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.taken += 1
                waiter.set_result(None)
