"""Connections to one backend: writing a request, finding the beginning and end of its answer, pooling.

llhttp (through httptools) parses answers and rejects malformed ones. It does not see whole chunks of a stream, which
are passed on unchanged: before and after them it is at the end of a chunk.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import httptools

from gateway._native import IN_C, event_chunks
from gateway.config import UpstreamConfig
from gateway.core.backends.backend import Backend, Origin
from gateway.core.backends.reachability import kind_of, why
from gateway.core.errors import (
    AnswerBrokeOff,
    BackendError,
    BackendProtocolError,
    ConnectFailed,
    FreshConnectionClosed,
    OutOfDescriptors,
    ReusedConnectionClosed,
)
from gateway.core.resources import are_used_up
from gateway.core.tls.contexts import BackendContexts
from gateway.core.tls.transport import EncryptedTransport
from gateway.core.turns import SLICE_BYTES, BoundedReads, Intake

_MAX_HEAD_BYTES = 65536
_MAX_HEADERS = 100
_LAST_OF_EVENT = b"\n\n\r\n"  # if it is the last of its chunk
_REST_SECONDS = 1.0  # that the end of an answer's framing may take
_RETRY_AFTER_SECONDS = 1.0  # when no file descriptor is left
_COPIED_BYTES = 4096  # a larger body is not worth a copy to save a buffer
_SURELY_READ_BYTES = 65536  # of a larger body, a backend that refuses it may leave a part unread


P = TypeVar("P", bound=asyncio.Protocol)


class Receiver(Protocol):
    """Gets one answer, which its connection collects."""

    def received(self) -> None:
        """More of the answer arrived; it is in `status`, `headers`, `parts` and `ended` of the connection."""

    def received_chunks(self, data: bytes, chunks: int) -> None:
        """So many chunks of a stream arrived, of whole events with nothing to read in them; `data` has their framing.

        Only while `passes_chunks` of the connection is true.
        """

    def failed(self, error: BackendError) -> None: ...


class BackendConnection(asyncio.Protocol):
    """At most one exchange at a time. Between exchanges a byte or an EOF from the backend makes it unusable."""

    def __init__(self, made_at: float) -> None:
        self.made_at = made_at
        self.idle_since = made_at
        self.exchanges = 0
        self.transport: asyncio.Transport | None = None
        # The current answer, or the last one.
        self.answered = False  # a byte of it has arrived
        self.ended = True  # it has arrived completely
        self.status = 0  # 0 = the head is not complete
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []  # of the body; the receiver clears it
        self.on_body = self.parts.append  # the parser calls it once an event: no frame for it
        self.passes_chunks = False  # set by the receiver: it takes usual chunks of a stream as they are
        self._chunk_ends: list[None] = []  # one for each end of a chunk, since the last read
        self.on_chunk_complete = partial(self._chunk_ends.append, None) if IN_C else None
        self._parser: Any = None  # while there is a transport: it has methods of this connection
        self._receiver: Receiver | None = None
        self._request_body_bytes = 0
        self._head_bytes = 0
        self._keep_alive = False
        self._between_chunks = False  # the parser has read up to the end of a chunk, which ended like an event
        self._intake = Intake()
        self._room: asyncio.Future[None] | None = None  # set while the write buffer is full

    def send(self, request: bytes, receiver: Receiver, body: bytes = b"") -> None:
        """Start an exchange: write a request, or its head. Only on an idle connection."""
        assert self.transport is not None
        self._receiver = receiver
        self.exchanges += 1
        self.answered = self.ended = self._keep_alive = self._between_chunks = self.passes_chunks = False
        self.status = self._head_bytes = 0
        self.headers = []
        self.parts.clear()
        self._request_body_bytes = len(body)
        if len(body) > _COPIED_BYTES:
            self.transport.writelines((request, body))
        else:
            self.transport.write(request + body)

    def finish(self, keep: Callable[["BackendConnection"], None]) -> None:
        """The answer is complete except for the end of its framing: give the connection to `keep` when that arrives."""
        self._receiver = _Rest(self, keep)
        self.resume_reading()

    def rest(self, now: float) -> bool:
        """Become idle. False = unusable, and closed: the last answer was not complete, the backend does not keep the
        connection open, or it has not taken the whole request.
        """
        transport = self.transport
        if not self._keep_alive or transport is None or transport.is_closing() or transport.get_write_buffer_size():
            self.abort()
            return False
        if self._intake.rest:  # bytes after the end of the answer
            self.abort()
            return False
        self.idle_since = now
        if self._intake.is_held or self._intake.is_bounded:  # by a slow client, or a long read
            self._intake.renew()
        return True

    def abort(self) -> None:
        """Close immediately; the backend sees a disconnect."""
        self._receiver = None
        self._intake.drop()
        if self.transport is not None:
            self.transport.abort()

    def pause_reading(self) -> None:
        """Read nothing from the backend until `resume_reading`: its client is slow."""
        self._intake.hold()

    def resume_reading(self) -> None:
        self._intake.go_on()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._intake.begin(self.transport, self.data_received)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if len(data) > SLICE_BYTES:
            self._intake.cut(data)
            return
        receiver = self._receiver
        if receiver is None:
            self.abort()  # unexpected bytes: they would be read as the next answer
            return
        if self._between_chunks:
            if self.passes_chunks and (chunks := event_chunks(data)):
                receiver.received_chunks(data, chunks)
                return
            self._between_chunks = False
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.ended:
                self._fail(BackendProtocolError(f"The backend's response is not valid HTTP: {error}."))
                return
            self.abort()  # the answer was complete, further bytes belong to no request
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._fail(BackendProtocolError("The headers of the backend's response are too large."))
                return
        if ends := self._chunk_ends:
            self._between_chunks = len(ends) == len(self.parts) and data.endswith(_LAST_OF_EVENT)
            ends.clear()
        receiver.received()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed. An answer that is not complete by now never will be."""
        self._intake.end()
        self.transport = None
        self.resume_writing()
        reason = f"({error})" if error else "(closed)"
        if self.answered:
            self._fail(AnswerBrokeOff(f"The backend closed the connection in the middle of the response {reason}."))
        elif self.exchanges > 1:
            self._fail(ReusedConnectionClosed(f"The backend closed the connection before the response {reason}."))
        else:
            self._fail(FreshConnectionClosed(f"The backend closed the connection before the response {reason}."))
        self.parts.clear()
        self._parser = None

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

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self.ended:
            raise ValueError("bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # not a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The end of a head; heads of 1xx answers are passed over."""
        if len(self.headers) > _MAX_HEADERS:
            raise ValueError("too many headers")
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
        else:
            self.status = status

    def on_message_complete(self) -> None:
        """The answer is complete: the parser knows only now whether the connection may be used again."""
        if not self.status:
            return
        self.ended = True
        self._receiver = None
        was_read = self._request_body_bytes <= _SURELY_READ_BYTES or self.status < 400
        self._keep_alive = was_read and self._parser.should_keep_alive()


class _Rest(Receiver):
    """Reads the end of an answer that the client has completely."""

    def __init__(self, connection: BackendConnection, keep: Callable[[BackendConnection], None]) -> None:
        self._connection = connection
        self._keep = keep
        self._late = asyncio.get_running_loop().call_later(_REST_SECONDS, connection.abort)

    def received(self) -> None:
        connection = self._connection
        if connection.parts or connection.ended:
            self._late.cancel()
            if connection.parts:  # more of the answer after its end
                connection.abort()
            else:
                self._keep(connection)

    def received_chunks(self, data: bytes, chunks: int) -> None:  # noqa: ARG002
        raise AssertionError("the rest of an answer has no events to pass on")

    def failed(self, error: BackendError) -> None:  # noqa: ARG002
        self._late.cancel()


class Pool:
    """Owner of a backend's connections. `tls` has the contexts of https URLs."""

    def __init__(
        self,
        backend: Backend,
        config: UpstreamConfig,
        clock: Callable[[], float],
        *,
        tls: BackendContexts | None = None,
    ) -> None:
        self.backend = backend
        self._clock = clock
        self._idle: list[BackendConnection] = []
        self._tls = tls or BackendContexts()
        self.open = 0  # in use
        self.apply(config)

    def apply(self, config: UpstreamConfig) -> None:
        """Take over settings of connections, and of the backend: the constant part of every request's head."""
        self._config = config
        self._keep_alive_seconds = config.keep_alive_seconds
        self._max_age_seconds = config.max_connection_age_seconds
        key, host = self.backend.config.api_key, self.backend.origin.host_header
        authorization = b"authorization: Bearer " + key.encode() + b"\r\n" if key else b""
        self.constant_head = b" HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n%b" % (host, authorization)

    def __repr__(self) -> str:
        return f"<Pool {self.backend.name} {self.open} in use, {len(self._idle)} idle>"

    def take_idle(self) -> BackendConnection | None:
        """The idle connection that was used last, if it may be used again."""
        now = self._clock()
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            if (
                transport is not None
                and not transport.is_closing()
                and now - connection.idle_since < self._keep_alive_seconds
                and now - connection.made_at < self._max_age_seconds
            ):
                self.open += 1
                return connection
            connection.abort()
        return None

    async def take_new(self) -> BackendConnection:
        """A connection that was never used. Raises ConnectFailed or OutOfDescriptors."""
        connection = await self._connect()
        self.open += 1
        return connection

    def give_back(self, connection: BackendConnection, *, answered: bool = False) -> None:
        """After an exchange: keep the connection if its answer was complete, else close it.

        `answered`: the client has its whole answer, so only the end of its framing can be missing.
        """
        self.open -= 1
        if answered and not connection.ended:
            connection.finish(self._keep)
        else:
            self._keep(connection)

    def _keep(self, connection: BackendConnection) -> None:
        idle, now = self._idle, self._clock()
        if connection.rest(now):
            idle.append(connection)
            while idle and now - idle[0].idle_since >= self._keep_alive_seconds:
                idle.pop(0).abort()

    def close(self) -> None:
        """Close the idle connections, and keep none from now on."""
        self._keep_alive_seconds = 0.0
        while self._idle:
            self._idle.pop().abort()

    async def _connect(self) -> BackendConnection:
        return await self.connect(lambda: BackendConnection(self._clock()))

    async def connect(self, make: Callable[[], P]) -> P:
        """A new connection with this protocol, which is not the pool's. Raises ConnectFailed or OutOfDescriptors."""
        origin, seconds, connection = self.backend.origin, self._config.connect_timeout_seconds, make()
        failure: OSError | None = None
        try:
            async with asyncio.timeout(seconds):
                if origin.tls:
                    context, name = await self._tls.options(self.backend.config.tls)
                    loop, bounded = asyncio.get_running_loop(), BoundedReads(connection)
                    encrypted = EncryptedTransport(
                        bounded, context, seconds, loop=loop, server_name=name or origin.host
                    )
                    await _opened(encrypted, origin)
                    failure = await encrypted.failure()
                else:
                    await _opened(connection, origin)
        except TimeoutError as error:
            raise ConnectFailed(
                f"Timeout: backend {self.backend.name!r} did not accept a connection within {seconds:g} s.",
                kind="timeout",
            ) from error
        except OSError as error:
            if are_used_up(error):
                raise OutOfDescriptors(
                    "The gateway has reached its limit of open files. Retry later, or raise the nofile limit.",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                ) from error
            raise self._not_connected(error) from error
        if failure is not None:
            raise self._not_connected(failure)
        return connection

    def _not_connected(self, error: OSError) -> ConnectFailed:
        message = f"Could not connect to backend {self.backend.name!r}: {why(error)}."
        failure = ConnectFailed(message, kind=kind_of(error).value)
        failure.__cause__ = error  # `Fleet.failed` reads it, and compiled code drops the cause after `from`
        return failure


async def _opened(protocol: asyncio.BaseProtocol, origin: Origin) -> None:
    try:
        await asyncio.get_running_loop().create_connection(lambda: protocol, origin.host, origin.port)
    except BaseException:  # uvloop does not close a connection if its task is cancelled just after its start
        protocol.connection_lost(None)
        raise
