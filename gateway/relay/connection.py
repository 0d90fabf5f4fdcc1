"""Connections to one backend: writing a request, finding where the answer begins and ends, pooling idle ones."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from gateway.backends.backend import Backend
from gateway.config import UpstreamConfig
from gateway.errors import (
    AnswerBrokeOff,
    BackendError,
    BackendProtocolError,
    ConnectFailed,
    FreshConnectionClosed,
    OutOfDescriptors,
    ReusedConnectionClosed,
)
from gateway.resources import are_used_up

_MAX_HEAD_BYTES = 65536
_MAX_HEADERS = 100
_REST_SECONDS = 1.0
_COPIED_BYTES = 4096  # a larger body is not worth a copy to save a buffer
_SURELY_READ_BYTES = 65536  # of a larger body, a backend that refuses it may leave a part unread


class Receiver(Protocol):
    """Gets one answer. Calls are in this order; `flushed` ends every batch of bytes that arrived together."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def body(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def flushed(self) -> None:
        """What arrived together has been handed on."""

    def failed(self, error: BackendError) -> None: ...


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
        self._room: asyncio.Future[None] | None = None  # set while the write buffer is full

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
        """Read nothing from the backend until `resume_reading`."""
        if self.transport is not None and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def rest(self, now: float) -> None:
        """The connection is idle from now on. A slow client may have paused it."""
        self.idle_since = now
        if self._paused:
            self.resume_reading()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self.abort()  # unexpected bytes: they would be read as the next answer
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
        """Backpressure: the write buffer is full."""
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def drained(self) -> None:
        """Wait until the write buffer has space, or the connection is closed."""
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
        return self._receiver is not None

    @property
    def reusable(self) -> bool:
        """The last answer was complete, the backend keeps the connection open, and has taken the whole request."""
        transport = self.transport
        return self._keep_alive and self.usable and transport is not None and not transport.get_write_buffer_size()


class _Rest:
    """Reads the end of an answer that the client has completely."""

    def __init__(self, connection: BackendConnection, keep: Callable[[BackendConnection], None]) -> None:
        self._connection = connection
        self._keep = keep
        self._ended = False
        self._late = asyncio.get_running_loop().call_later(_REST_SECONDS, connection.abort)

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Does not come: the head has been taken."""

    def body(self, data: bytes) -> None:  # noqa: ARG002
        """More of the answer after its end: the connection is unusable."""
        self._late.cancel()
        self._connection.abort()

    def end(self) -> None:
        self._ended = True

    def flushed(self) -> None:
        if self._ended:
            self._late.cancel()
            self._keep(self._connection)

    def failed(self, error: BackendError) -> None:  # noqa: ARG002
        self._late.cancel()


_RETRY_AFTER_SECONDS = 1.0


class Pool:
    """Owner of a backend's connections."""

    def __init__(self, backend: Backend, config: UpstreamConfig, clock: Callable[[], float]) -> None:
        self.backend = backend
        self._config = config
        self._clock = clock
        self._idle: list[BackendConnection] = []
        self._tls = ssl.create_default_context() if backend.origin.tls else None
        self._heads: dict[tuple[bytes, bytes], bytes] = {}
        self.open = 0  # in use

    def __repr__(self) -> str:
        return f"<Pool {self.backend.name} {self.open} in use, {len(self._idle)} idle>"

    def request_head(self, method: bytes, target: bytes) -> bytes:
        """The constant first lines of a request to this backend."""
        head = self._heads.get((method, target))
        if head is None:
            key = self.backend.api_key
            authorization = b"authorization: Bearer " + key.encode() + b"\r\n" if key else b""
            host = self.backend.origin.host_header
            head = b"%b %b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n%b" % (
                method,
                target,
                host,
                authorization,
            )
            if len(self._heads) < 256:  # targets with an id in them must not pile up
                self._heads[method, target] = head
        return head

    async def take(self, *, fresh: bool = False) -> BackendConnection:
        """A usable connection; `fresh` = not one that was used before. Raises ConnectFailed or OutOfDescriptors."""
        if not fresh:
            config, now = self._config, self._clock()
            while self._idle:
                connection = self._idle.pop()
                if (
                    connection.usable
                    and now - connection.idle_since < config.keep_alive_seconds
                    and now - connection.made_at < config.max_connection_age_seconds
                ):
                    self.open += 1
                    return connection
                connection.abort()
        connection = await self._connect()
        self.open += 1
        return connection

    def give_back(self, connection: BackendConnection, *, answered: bool = False) -> None:
        """After an exchange: keep the connection if its answer was complete, else close it.

        `answered`: the client has its whole answer, so only the end of its framing can be missing.
        """
        self.open -= 1
        if answered and connection.busy:
            connection.finish(self._keep)
        else:
            self._keep(connection)

    def _keep(self, connection: BackendConnection) -> None:
        if not connection.reusable:
            connection.abort()
            return
        idle, now = self._idle, self._clock()
        connection.rest(now)
        idle.append(connection)
        while idle and now - idle[0].idle_since >= self._config.keep_alive_seconds:
            idle.pop(0).abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _connect(self) -> BackendConnection:
        origin, loop = self.backend.origin, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.connect_timeout_seconds):
                _, connection = await loop.create_connection(
                    lambda: BackendConnection(self._clock()), origin.host, origin.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectFailed(
                f"Timeout: backend {self.backend.name!r} did not accept a connection"
                f" within {self._config.connect_timeout_seconds:g} s."
            ) from error
        except OSError as error:
            if are_used_up(error):
                raise OutOfDescriptors(
                    "The gateway has reached its limit of open files. Retry later, or raise the nofile limit.",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                ) from error
            raise ConnectFailed(f"Could not connect to backend {self.backend.name!r}: {error}.") from error
        return connection
