"""A backend's answer to a batch or piece, buffered within bounds, and a client's answer, sent in parts."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from gateway.errors import GatewayError, MemoryFull, WrongAnswer
from gateway.observe.record import Record
from gateway.request import InferenceRequest, Sink, UpstreamResult
from gateway.resources import Holding

_JSON = b"application/json"
_WHOLE_BYTES = 1048576
Dispatch = Callable[[InferenceRequest, Sink, Record], Awaitable[UpstreamResult]]  # as `Dispatcher.dispatch`


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
    room = asyncio.Event()
    reply.when_writable(room.set)
    try:
        for piece in pieces:
            room.clear()
            if reply.write(piece) and reply.blocked:
                await room.wait()
            else:
                await asyncio.sleep(0)
    finally:
        reply.when_writable(None)
    reply.end()


class BufferedResponse:
    """Keeps one whole answer of at most `most_bytes`, in memory that `holding` reserves; ends `fetching` at a bound."""

    blocked = False

    def __init__(self, most_bytes: int, holding: Holding, fetching: asyncio.Timeout) -> None:
        self.begun = False
        self.status = 0
        self.content_type = b""
        self.headers = b""
        self.error: GatewayError | None = None  # why no more is kept
        self._most_bytes = most_bytes
        self._holding = holding
        self._fetching = fetching
        self._body = bytearray()

    def __repr__(self) -> str:
        return f"<BufferedResponse {self.status}, {len(self._body)} of at most {self._most_bytes} bytes>"

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        self.begin(status, content_type, extra)
        self.write(body)

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        self.begun = True
        self.status, self.content_type, self.headers = status, content_type, extra

    def comment(self) -> None:
        """Dropped: no client reads keep-alive comments here."""

    def write(self, data: bytes) -> bool:
        """Keep body bytes. True = no more are taken."""
        if self.error is not None:
            return True
        try:
            if len(self._body) + len(data) > self._most_bytes:
                raise WrongAnswer(f"The backend's response exceeds the limit of {self._most_bytes} bytes.")
            self._holding.add(len(data))
        except (WrongAnswer, MemoryFull) as error:
            self.error = error
            if not self._fetching.expired():
                self._fetching.reschedule(asyncio.get_running_loop().time())
            return True
        self._body += data
        return False

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        """A full buffer ends the request: it is never writable again."""

    def set_backend_headers(self, lines: bytes) -> None:
        """The response to each client gets headers of its own."""

    def end(self) -> None: ...


async def fetch(
    dispatch: Dispatch, request: InferenceRequest, record: Record, most_bytes: int, holding: Holding
) -> BufferedResponse:
    """The whole answer to a request. Raises WrongAnswer or MemoryFull, and aborts it, at the bound."""
    fetching = asyncio.timeout(None)
    response = BufferedResponse(most_bytes, holding, fetching)
    try:
        async with fetching:
            await dispatch(request, response, record)
    except (TimeoutError, GatewayError):
        if response.error is None:
            raise
    if response.error is not None:
        raise response.error
    return response
