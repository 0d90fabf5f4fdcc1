"""A backend's answer to a batch or piece, buffered within bounds, and a client's answer, sent in parts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

from gateway.errors import GatewayError, MemoryFull, WrongAnswer
from gateway.request import Sink
from gateway.resources import Holding

_JSON = b"application/json"
_WHOLE_BYTES = 1048576


class ClientTarget(Sink, Protocol):
    """The response to one client."""

    @property
    def address(self) -> str: ...

    def add_headers(self, lines: bytes) -> None:
        """Header lines of the response, also of an error."""


async def deliver(reply: ClientTarget, pieces: Iterator[bytes], size_bytes: int) -> None:
    """Write an answer of about this size. A long one is produced as fast as the client reads it."""
    if size_bytes <= _WHOLE_BYTES:
        reply.send(200, _JSON, b"", b"".join(pieces))
        return
    reply.begin(200, _JSON, b"")
    for piece in pieces:
        if reply.write(piece):
            await _room(reply)
        else:
            await asyncio.sleep(0)
    reply.end()


async def _room(reply: ClientTarget) -> None:
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_come() -> None:
        if not room.done():
            room.set_result(None)

    reply.when_writable(has_come)
    try:
        if reply.blocked:
            await room
    finally:
        reply.when_writable(None)


class BufferedResponse:
    """Keeps one whole answer of at most `most_bytes`, in memory that `holding` reserves."""

    blocked = False

    def __init__(self, most_bytes: int, holding: Holding) -> None:
        self.begun = False
        self.status = 0
        self.content_type = b""
        self.headers = b""
        self._most_bytes = most_bytes
        self._holding = holding
        self._body = bytearray()
        self._error: GatewayError | None = None
        self._filling: asyncio.Timeout | None = None

    def __repr__(self) -> str:
        return f"<BufferedResponse {self.status}, {len(self._body)} of at most {self._most_bytes} bytes>"

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    @asynccontextmanager
    async def filling(self) -> AsyncIterator[None]:
        """Abort the block that fetches the answer at the bound. Raises WrongAnswer or MemoryFull then."""
        try:
            async with asyncio.timeout(None) as self._filling:
                yield
        except (TimeoutError, GatewayError):
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        self.begin(status, content_type, extra)
        self.write(body)

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        """The head of an answer of unknown length."""
        self.begun = True
        self.status, self.content_type, self.headers = status, content_type, extra

    def comment(self) -> None:
        """Dropped: no client reads keep-alive comments here."""

    def write(self, data: bytes) -> bool:
        """Keep body bytes. True = no more are taken."""
        if self._error is None:
            self._keep(data)
        return self._error is not None

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        """A full buffer ends the request: it is never writable again."""

    def set_backend_headers(self, lines: bytes) -> None:
        """The response to each client gets headers of its own."""

    def end(self) -> None: ...

    def _keep(self, data: bytes) -> None:
        if len(self._body) + len(data) > self._most_bytes:
            self._give_up(WrongAnswer(f"The backend's response exceeds the limit of {self._most_bytes} bytes."))
            return
        try:
            self._holding.add(len(data))
        except MemoryFull as error:
            self._give_up(error)
        else:
            self._body += data

    def _give_up(self, error: GatewayError) -> None:
        self._error = error
        if self._filling is not None and not self._filling.expired():
            self._filling.reschedule(asyncio.get_running_loop().time())
