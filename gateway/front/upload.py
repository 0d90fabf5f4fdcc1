"""A request body that is passed on while it still arrives."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from gateway.errors import GatewayError
from gateway.memory import Holding

_HELD_BYTES = 1048576
_PIECE_BYTES = 65536


class Upload:
    """Pieces of a body, in order; what waits here is reserved in `holding`.

    `read_more(False)` is called when as much waits as may, `read_more(True)` later.
    """

    def __init__(self, read_more: Callable[[bool], None], holding: Holding) -> None:
        self.on_end: Callable[[], None] | None = None  # called when nothing more will arrive
        self.ended = False  # nothing more will arrive
        self.held_bytes = 0
        self._read_more = read_more
        self._holding = holding
        self._pieces: deque[bytes] = deque()
        self.came_bytes = 0
        self._last = bytearray()  # behind the pieces: small chunks are joined here
        self._closed = False
        self._error: GatewayError | None = None
        self._arrival = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """A piece arrived. Raises MemoryFull."""
        if self._closed:
            return
        self._hold(len(data))
        self.came_bytes += len(data)
        self._last += data
        if len(self._last) >= _PIECE_BYTES:
            self._pieces.append(bytes(self._last))
            self._last.clear()
        self._arrival.set()
        if self.held_bytes >= _HELD_BYTES:
            self._read_more(False)

    def end(self, error: GatewayError | None = None) -> None:
        """The body is complete, or will never be."""
        self.ended = True
        self._error = error
        self._arrival.set()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def close(self) -> None:
        """Discard what waits and what still arrives: the rest is not needed. Idempotent."""
        self._closed = True
        self._pieces.clear()
        self._last.clear()
        self._let_go(self.held_bytes)
        self._arrival.set()

    def put_back(self, pieces: list[bytes]) -> None:
        """Pieces that were looked at and are to be passed on first. Raises MemoryFull."""
        if self._closed:
            return
        self._hold(sum(map(len, pieces)))
        self._pieces.extendleft(reversed(pieces))
        self._arrival.set()

    async def collected(self) -> None:
        """Wait until the body is complete, or as much of it has arrived as may wait here."""
        while not (self.ended or self._closed) and self.held_bytes < _HELD_BYTES:
            self._arrival.clear()
            await self._arrival.wait()
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not (self._pieces or self._last):
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        if self._pieces:
            piece = self._pieces.popleft()
        else:
            piece = bytes(self._last)
            self._last.clear()
        self._let_go(len(piece))
        if self.held_bytes < _HELD_BYTES:
            self._read_more(True)
        return piece

    def _hold(self, size_bytes: int) -> None:
        self._holding.add(size_bytes)
        self.held_bytes += size_bytes

    def _let_go(self, size_bytes: int) -> None:
        self._holding.shrink(size_bytes)
        self.held_bytes -= size_bytes
