"""One connection to a backend: writes a request, finds where the answer begins and ends, hands its bytes on."""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from gateway.errors import (
    AnswerBrokeOff,
    BackendError,
    BackendProtocolError,
    FreshConnectionClosed,
    ReusedConnectionClosed,
)

_MAX_HEAD_BYTES = 65536
_MAX_HEADERS = 100
_REST_SECONDS = 1.0
_COPIED_BYTES = 4096  # a larger body is not worth a copy to save a buffer
_SURELY_READ_BYTES = 65536  # of a larger body, a backend that refuses it may leave a part unread


class Receiver(Protocol):
    """Takes one answer. Calls come in this order; `flushed` ends every batch of bytes that arrived together."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The final status and headers."""

    def body(self, data: bytes) -> None:
        """Body bytes, without their framing."""

    def end(self) -> None:
        """The answer is complete."""

    def flushed(self) -> None:
        """What arrived together has been handed on."""

    def failed(self, error: BackendError) -> None:
        """The answer broke off."""


class BackendConnection(asyncio.Protocol):
    """At most one exchange at a time. Between exchanges a byte or an EOF from the backend makes it unusable."""

    __slots__ = (
        "_body_bytes", "_head_bytes", "_headers", "_in_head", "_informational", "_keep_alive", "_parser", "_paused",
        "_receiver", "_room", "answered", "exchanges", "idle_since", "made_at", "transport",
    )  # fmt: skip

    def __init__(self, made_at: float) -> None:
        self.made_at = made_at
        self.idle_since = made_at
        self.exchanges = 0
        self.answered = False  # a byte of the current answer has arrived
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body_bytes = 0  # of the request
        self._head_bytes = 0
        self._in_head = False
        self._informational = False
        self._keep_alive = False
        self._paused = False
        self._room: asyncio.Future[None] | None = None  # set while the backend takes no more

    @property
    def usable(self) -> bool:
        """Open, and free for a request."""
        return self._receiver is None and self.transport is not None and not self.transport.is_closing()

    def send(self, request: bytes, receiver: Receiver, body: bytes = b"") -> None:
        """Start an exchange: write a request, or its head. Only on a usable connection."""
        assert self.transport is not None
        self._receiver = receiver
        self.exchanges += 1
        self.answered = False
        self._keep_alive = False
        self._body_bytes = len(body)
        self._head_bytes = 0
        self._in_head = True
        if len(body) > _COPIED_BYTES:
            self.transport.writelines((request, body))
        else:
            self.transport.write(request + body)

    def finish(self, keep: Callable[["BackendConnection"], None]) -> None:
        """The answer is complete but for the end of its framing: give the connection to `keep` when that has come."""
        self._receiver = _Rest(self, keep)
        self.resume_reading()

    def abort(self) -> None:
        """Close at once; the backend sees that its client is gone."""
        self._receiver = None
        if self.transport is not None:
            self.transport.abort()

    def pause_reading(self) -> None:
        """Take nothing from the backend until told otherwise."""
        if self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what comes again."""
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        receiver = self._receiver
        if receiver is None:
            self.abort()  # bytes that nobody asked for: the next answer could not be told from them
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._receiver is not None:
                self._fail(BackendProtocolError(f"The backend's response is not valid HTTP: {error}."))
                return
            self.abort()  # the answer was complete, what follows it is not ours
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._fail(BackendProtocolError("The headers of the backend's response are too large."))
                return
        receiver.flushed()

    def eof_received(self) -> bool:
        """The backend ended the connection; asyncio closes it."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed. An answer that is not complete by now never will be."""
        self.transport = None
        self.resume_writing()
        if self._receiver is None:
            return
        reason = f"({error})" if error else "(closed)"
        if self.answered:
            self._fail(AnswerBrokeOff(f"The backend closed the connection in the middle of the response {reason}."))
        elif self.exchanges > 1:
            self._fail(ReusedConnectionClosed(f"The backend closed the connection before the response {reason}."))
        else:
            self._fail(FreshConnectionClosed(f"The backend closed the connection before the response {reason}."))

    def pause_writing(self) -> None:
        """The backend takes no more for now."""
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """The backend takes more."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def drained(self) -> None:
        """Wait until the backend takes more, or is gone."""
        if self._room is not None:
            await self._room

    def _fail(self, error: BackendError) -> None:
        receiver, self._receiver = self._receiver, None
        self.abort()
        if receiver is not None:
            receiver.failed(error)

    # What the parser calls.

    def on_message_begin(self) -> None:
        """The first byte of an answer."""
        if self._receiver is None:
            raise ValueError("bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        self._headers.append((name, value))
        if len(self._headers) > _MAX_HEADERS:
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        """The end of a head; heads of 1xx answers are passed over."""
        status = self._parser.get_status_code()
        self._informational = status < 200
        if not self._informational and self._receiver is not None:
            self._in_head = False
            self._receiver.head(status, self._headers)
        self._headers = []

    def on_body(self, data: bytes) -> None:
        """Body bytes."""
        if self._receiver is not None:
            self._receiver.body(data)

    def on_message_complete(self) -> None:
        """The answer is complete: the parser knows only now whether the connection may be used again."""
        if self._informational:
            return
        receiver, self._receiver = self._receiver, None
        was_read = self._body_bytes <= _SURELY_READ_BYTES or self._parser.get_status_code() < 400
        self._keep_alive = was_read and self._parser.should_keep_alive()
        if receiver is None:
            raise ValueError("bytes after the end of the response")
        receiver.end()

    @property
    def busy(self) -> bool:
        """An answer is under way."""
        return self._receiver is not None

    @property
    def reusable(self) -> bool:
        """The last answer was complete, the backend keeps the connection open, and has taken the whole request."""
        transport = self.transport
        return self._keep_alive and self.usable and transport is not None and not transport.get_write_buffer_size()


class _Rest:
    """Takes the end of an answer that is over for its client."""

    def __init__(self, connection: BackendConnection, keep: Callable[[BackendConnection], None]) -> None:
        self._connection = connection
        self._keep = keep
        self._ended = False
        self._late = asyncio.get_running_loop().call_later(_REST_SECONDS, connection.abort)

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Does not come: the head has been taken."""

    def body(self, data: bytes) -> None:  # noqa: ARG002
        """More of the answer after its end: the connection is of no use."""
        self._late.cancel()
        self._connection.abort()

    def end(self) -> None:
        """The end of the framing."""
        self._ended = True

    def flushed(self) -> None:
        """Give the connection back."""
        if self._ended:
            self._late.cancel()
            self._keep(self._connection)

    def failed(self, error: BackendError) -> None:  # noqa: ARG002
        """The connection broke; nobody minds."""
        self._late.cancel()
