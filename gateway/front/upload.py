"""A request body that is passed on while it still arrives."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from gateway.errors import GatewayError

_FULL_BYTES = 262144


class Upload:
    """Pieces of a body, in order. `read_more(False)` is called when too much of it waits, `read_more(True)` later."""

    def __init__(self, read_more: Callable[[bool], None]) -> None:
        self._read_more = read_more
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._error: GatewayError | None = None
        self._arrival = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """A piece arrived."""
        self._pieces.append(data)
        self._bytes += len(data)
        self._arrival.set()
        if self._bytes > _FULL_BYTES:
            self._read_more(False)

    def end(self, error: GatewayError | None = None) -> None:
        """The body is complete, or will never be."""
        self._ended = True
        self._error = error
        self._arrival.set()

    def put_back(self, pieces: list[bytes]) -> None:
        """Pieces that were looked at and are to be passed on first."""
        self._pieces.extendleft(reversed(pieces))
        self._bytes += sum(map(len, pieces))
        self._arrival.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        piece = self._pieces.popleft()
        self._bytes -= len(piece)
        if self._bytes <= _FULL_BYTES:
            self._read_more(True)
        return piece
