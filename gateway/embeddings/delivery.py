"""A backend's answer to a batch or piece, kept in memory within bounds, and a client's answer, sent piece by piece."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from gateway.errors import GatewayError, MemoryFull, WrongAnswer
from gateway.front.reply import JSON, Reply
from gateway.resources import Holding

_WHOLE_BYTES = 1048576


async def deliver(reply: Reply, pieces: Iterator[bytes], size_bytes: int) -> None:
    """Write an answer of about this size. A long one is made as fast as the client takes it."""
    if size_bytes <= _WHOLE_BYTES:
        reply.send(200, JSON, b"", b"".join(pieces))
        return
    reply.begin(200, JSON, b"")
    for piece in pieces:
        if reply.write(piece):
            await _room(reply)
        else:
            await asyncio.sleep(0)
    reply.end()


async def _room(reply: Reply) -> None:
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def has_come() -> None:
        if not room.done():
            room.set_result(None)

    reply.on_room = has_come
    try:
        if reply.blocked:
            await room
    finally:
        reply.on_room = None


class Collected:
    """Keeps one whole answer of at most so many bytes, and takes them of the memory that `holding` reserves."""

    blocked = False

    def __init__(self, most_bytes: int, holding: Holding) -> None:
        self.begun = False
        self.on_room: Callable[[], None] | None = None
        self.extra = b""  # header lines for a client, of whom there are many here
        self.status = 0
        self.content_type = b""
        self.headers = b""
        self._most_bytes = most_bytes
        self._holding = holding
        self._body = bytearray()
        self._error: GatewayError | None = None
        self._filling: asyncio.Timeout | None = None

    def __repr__(self) -> str:
        return f"<Collected {self.status}, {len(self._body)} of at most {self._most_bytes} bytes>"

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    @asynccontextmanager
    async def filling(self) -> AsyncIterator[None]:
        """Have the block fetch the answer, and abort it at the bound. Raises WrongAnswer or MemoryFull then."""
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
        """The head of an answer whose length is not known."""
        self.begun = True
        self.status, self.content_type, self.headers = status, content_type, extra

    def comment(self) -> None:
        """Nobody waits for signs of life here."""

    def write(self, data: bytes) -> bool:
        """Body bytes. True = no more are taken."""
        if self._error is None:
            self._keep(data)
        return self._error is not None

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
