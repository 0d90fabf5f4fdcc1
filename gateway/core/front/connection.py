"""A client's HTTP/1.1 connection: bytes to requests, one at a time, with a bound on everything a client chooses.

llhttp (through httptools) parses the messages and rejects malformed ones. Unused parts are dropped here: no client
header, path or framing reaches a backend unchanged. The realtime API has another protocol, WebSocket: its bytes go
through a tunnel. Other upgrades (HTTP/2) are ignored; a second parser reads the body that llhttp leaves.

Few answers begin in one turn of the event loop. Requests that arrive together are read and placed when their answers
begin: handling all of them in one turn would stop the event loop, and with it every stream, for as long as that takes.
"""

import asyncio
import enum
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from gateway._native import whole_request
from gateway.config import ServerConfig
from gateway.core.errors import GatewayError, HeadersTooLarge, InvalidRequest, RequestTimeout
from gateway.core.front.body import Body, Upload, body_parser, has_body
from gateway.core.front.http_request import MAX_HEADERS, HttpRequest, KeyCheck
from gateway.core.front.reply import ClientResponse, Wire
from gateway.core.front.routes import RouteTable
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.turns import Intake

AT_ONCE = 32


class Beginner(Protocol):
    """A connection whose next answer is due."""

    def proceed(self) -> None:
        """Ask again whether the answer may begin."""


class Beginnings:
    """Counts the beginning answers, and postpones answers beyond `AT_ONCE`."""

    def __init__(self) -> None:
        self._beginning = 0
        self._put_off: deque[Beginner] = deque()

    def may_begin(self, connection: Beginner) -> bool:
        """Whether its next answer may begin now; if not, its `proceed` is called, in order, when others have begun."""
        if self._beginning < AT_ONCE:
            self._beginning += 1
            return True
        self._put_off.append(connection)
        return False

    def begun(self) -> None:
        """An answer that might begin has done so, or never will.

        The postponed connections ask again, in order.
        """
        self._beginning -= 1
        while self._put_off and self._beginning < AT_ONCE:
            self._put_off.popleft().proceed()


_MAX_LINE_BYTES = 8190
_MAX_HEAD_BYTES = 65536
_LARGE_BODY_BYTES = 65536  # rejected at the end of its head if the memory budget is used up
_SLICE_BYTES = 2048  # parsed in one step
_LINGER_SECONDS = 2.0
_WRITE_BUFFER_BYTES = 4096  # plus one slice of a read from a backend, or one long event
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # its first byte is the connection's state; Linux has it
_TCP_ESTABLISHED = 1


class RequestHandler(Protocol):
    """Answers requests. `check_key`: None = no API keys are configured."""

    known_headers: frozenset[bytes]
    check_key: KeyCheck | None
    routes: RouteTable

    async def serve(self, incoming: HttpRequest, connection: "ClientConnection") -> None: ...

    def start_draining(self) -> None: ...


class Host(Protocol):
    """A connection's server; `Server` has the meaning of its methods."""

    config: ServerConfig
    handler: RequestHandler
    memory: MemoryBudget
    read_buffer: memoryview  # shared by all connections: bytes are parsed or copied before the next read
    beginnings: Beginnings

    def connected(self, connection: "ClientConnection") -> bool: ...

    def disconnected(self, connection: "ClientConnection") -> None: ...


class _Phase(enum.Enum):
    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    LINGER = enum.auto()


class ClientConnection(Wire, asyncio.BufferedProtocol):
    """Parses requests, runs one answer at a time in a task, and cancels it when the client leaves."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.blocked = False  # backpressure: the write buffer is full
        self.was_cut = False
        self.reply: ClientResponse | None = None
        self._host = host
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._intake = Intake()
        self._holding = Holding(host.memory)  # bytes from this client that are still needed
        self._body = Body(self._holding)  # being parsed
        self.on_body = self._body.receive  # called by the parser
        self._parser: Any = httptools.HttpRequestParser(self)
        self._parsing = _Phase.IDLE  # how far the request being parsed is
        self._since = loop.time()  # when the client began to be idle, or its head to arrive
        self._unsent_bytes = 0  # at the last look
        self._taken_seconds = self._since  # when that had become less
        self._incoming = HttpRequest()  # being parsed
        self._address, self._path = "", b""  # of the client; of the request being parsed
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pipelined: deque[HttpRequest] = deque()  # not begun yet
        self._stash = bytearray()  # pipelined bytes that are not parsed yet
        self._deaf = False  # nothing more is parsed: malformed, rejected, or closing
        self._task: asyncio.Task[None] | None = None
        self._is_beginning = False  # the task has not run yet
        self._tunnel: Callable[[bytes], None] | None = None  # gets the bytes of another protocol
        self._give: Callable[[int], None] | None = None  # gives the connection to another process once it is idle

    @property
    def address(self) -> str:
        """The client's network address, fetched once, and only if it is needed."""
        if not self._address and self._transport is not None:
            self._address = str((self._transport.get_extra_info("peername") or ("",))[0])
        return self._address

    @property
    def answering(self) -> bool:
        return self._task is not None

    @property
    def idle(self) -> bool:
        """Every request that has arrived is answered."""
        return self._task is None and self._parsing is _Phase.IDLE and not self._pipelined

    def write(self, data: bytes) -> bool:
        """Send bytes; dropped when the client is gone. True = its buffer is full."""
        if self._transport is not None:
            self._transport.write(data)
        return self.blocked

    def give_when_idle(self, give: Callable[[int], None]) -> None:
        """Give a copy of the socket to another process as soon as every request is answered, and close this one."""
        self._give = give
        self.look_idle()

    def look_idle(self) -> None:
        """Give the connection away, if requested and if none of its bytes are in this process."""
        transport = self._transport
        if self._give is None or transport is None or transport.is_closing() or self._deaf or not self.idle:
            return
        if self._stash or transport.get_write_buffer_size():
            return
        if transport.get_extra_info("sslcontext") is not None:
            self.close()  # its keys are in this process alone: the client connects anew
            return
        try:
            file = os.dup(transport.get_extra_info("socket").fileno())
        except OSError:  # no descriptor is left: this is called again
            return
        self._deaf = True
        self._give(file)
        transport.abort()

    def open_tunnel(self, receive: Callable[[bytes], None]) -> None:
        """Pass on the client's bytes after its request for another protocol."""
        self._tunnel = receive
        self.read_more(True)

    def cut(self, error: GatewayError) -> None:
        """Abort whatever is in progress, with this error for the client."""
        self.was_cut = True
        if self._task is not None and self.reply is not None and not self.reply.complete:
            self.reply.fail(error)
        self.close()

    def attach(self, reply: ClientResponse) -> None:
        """The response to the current request. `cut` ends it, and backpressure is reported to it."""
        self.reply = reply

    def close(self) -> None:
        """Close once the buffered data has been sent."""
        self._drop_pending()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close immediately, and discard buffered data."""
        self._drop_pending()
        if self._transport is not None:
            self._transport.abort()

    def _drop_pending(self) -> None:
        """Parse and begin nothing more: drop the received bytes, and give their memory back."""
        self._deaf = True
        self._body.drop()
        self._holding.shrink(len(self._stash))
        self._stash.clear()
        while self._pipelined:
            self._pipelined.popleft().end(self._holding)

    def look(self, now: float) -> None:
        """Close the connection if its client has been too slow for its phase. Called about once a second."""
        config, passed, transport = self._host.config, now - self._since, self._transport
        most_seconds = _LINGER_SECONDS if self._parsing is _Phase.LINGER else config.keep_alive_seconds
        if transport is not None and (self._takes_nothing(transport, now) or self._has_left(transport)):
            transport.abort()
        elif self._parsing is _Phase.BODY and not self._deaf:
            try:
                self._body.look(now, config, held_back=transport is not None and not transport.is_reading())
            except RequestTimeout as slow:
                self._refuse(slow)
        elif self._task is not None:
            return
        elif self._parsing is _Phase.HEAD and passed > config.header_timeout_seconds:
            self._refuse(
                RequestTimeout(f"Timeout: the request headers took over {config.header_timeout_seconds:g} s to arrive.")
            )
        elif self._parsing is not _Phase.HEAD and not self._pipelined and passed > most_seconds:
            self.close()

    def _takes_nothing(self, transport: asyncio.Transport, now: float) -> bool:
        """Whether the client has read nothing for too long; also while the connection is closing."""
        unsent = transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent_bytes:
            self._taken_seconds = now
        self._unsent_bytes = unsent
        return now - self._taken_seconds > self._host.config.write_stall_seconds

    def _has_left(self, transport: asyncio.Transport) -> bool:
        """Whether the client has closed its socket. While nothing is read, only the socket's state shows it."""
        peer = None if transport.is_reading() or _TCP_INFO is None else transport.get_extra_info("socket")
        if peer is None or peer.family == socket.AF_UNIX:
            return False
        return bool(peer.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] != _TCP_ESTABLISHED)

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._intake.begin(self._transport, self.data_received)
        if not self._host.connected(self):
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """The client disconnected: its request is cancelled and releases its resources."""
        self._transport = None
        self.blocked = False
        incoming, self._incoming = self._incoming, HttpRequest()
        if incoming.upload is not None:
            incoming.upload.end(InvalidRequest("The client disconnected before the upload was complete."))
        if self._task is not None and not self._is_beginning:
            self._task.cancel()
        self._drop_pending()
        self._intake.end()
        self._parser = self._tunnel = None  # they have methods of this connection
        self._host.disconnected(self)

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        if self.reply is not None and self.reply.on_writable is not None:
            self.reply.on_writable()
        self.proceed()

    def proceed(self) -> None:
        """Continue with the requests that waited for a full buffer, or for other requests to begin."""
        if self._task is None and self._pipelined:
            self._next()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._host.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes of requests have been read."""
        data = self._host.read_buffer[:nbytes]
        if self._deaf or self._pipelined or self._stash:
            self.data_received(data)
        elif self._parsing is _Phase.IDLE and self._task is None and self._take_whole(data):
            return
        elif nbytes <= _SLICE_BYTES:
            self._parse(data)
        else:
            self.data_received(data)
            if nbytes == len(self._host.read_buffer) and self._body.left_bytes <= 0:
                self._intake.pause()  # more may arrive, at a higher cost than a body of known length

    def _take_whole(self, data: memoryview) -> bool:
        """Take a complete request in one piece, without unusual parts, without the parser.

        False = the parser has to read it, or to refuse it.
        """
        handler = self._host.handler
        whole = whole_request(data, handler.known_headers)
        if whole is None:
            return False
        incoming = HttpRequest()
        incoming.take_whole(*whole)
        try:
            if incoming.admit(handler.check_key, self._host.config, handler.routes):
                return False
            self._holding.add(incoming.held_bytes)
        except GatewayError:
            return False
        self._incoming = incoming
        self._ready(incoming)
        return True

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse bytes of requests, up to the first request that has to wait."""
        if self._tunnel is not None:
            self._tunnel(bytes(data))
            return
        start, end = 0, len(data)
        while start < end and not self._deaf:
            if self._pipelined or self._stash:  # sent ahead: kept unparsed, and nothing more is read
                try:
                    self._holding.add(end - start)
                except GatewayError as error:
                    self._refuse(error)
                    return
                self._stash += data[start:]
                self.read_more(False)
                return
            stop = start + max(_SLICE_BYTES, self._body.left_bytes)  # a whole body, but few requests
            self._parse(memoryview(data)[start:stop])
            start = stop

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._parsing is _Phase.BODY and not self._deaf:
                self._parser = body_parser(self, self._incoming.headers)
                self._parse(data[upgrade.args[0] :])
                return
            self._deaf = True  # the request itself is complete; later bytes would be another protocol
            if self._incoming.upgrade(len(data) - upgrade.args[0]):
                self.read_more(False)  # until the other protocol begins
        except httptools.HttpParserCallbackError as error:
            self._refuse(_refusal(error))
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"Malformed HTTP: {error}."))
        if self._parsing is _Phase.HEAD:
            if not self._head_bytes:
                self._since = self._loop.time()
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"The request headers exceed the limit of {_MAX_HEAD_BYTES} bytes."))
        elif self._parsing is _Phase.BODY and not self._deaf:
            try:
                self._body.framed(len(data))
            except InvalidRequest as error:
                self._refuse(error)

    def read_more(self, more: bool) -> None:
        """Whether to read more of the client's bytes (backpressure)."""
        if more:
            self._intake.go_on()
        else:
            self._intake.hold()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._incoming = HttpRequest()
        self._path = b""
        self._headers = []
        self._head_bytes = 0
        self._parsing = _Phase.HEAD

    def on_url(self, url: bytes) -> None:
        """The request target, in one or more pieces."""
        self._path += url
        if len(self._path) > _MAX_LINE_BYTES:
            raise HeadersTooLarge(f"The request line exceeds the limit of {_MAX_LINE_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the head, or a trailer: trailers are counted and ignored."""
        self._headers.append((name, value))
        if len(self._headers) > MAX_HEADERS:
            raise HeadersTooLarge(f"The request exceeds the limit of {MAX_HEADERS} headers and trailers.")

    def on_headers_complete(self) -> None:
        """The end of the head: refuse bad requests before the body is read."""
        incoming, parser, handler = self._incoming, self._parser, self._host.handler
        incoming.take_head(
            parser.get_method(), self._path, parser.get_http_version(), self._headers, handler.known_headers
        )
        is_streamed = incoming.admit(handler.check_key, self._host.config, handler.routes)
        headers = incoming.headers
        length = int(headers.get(b"content-length", 0))
        if is_streamed:
            incoming.stream_body(Upload(self.read_more, self._holding))
        self._body.start(incoming.max_body_bytes, length, self._loop.time(), incoming.upload)
        if length > _LARGE_BODY_BYTES and not is_streamed:
            with Holding(self._host.memory) as room:
                room.add(length)
        if b"expect" in headers and not incoming.http10 and not self._pipelined and self._task is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._parsing = _Phase.BODY
        if is_streamed:
            self._ready(incoming)

    def on_message_complete(self) -> None:
        incoming = self._incoming
        if not self._body.size_bytes and has_body(incoming.headers) and self._parser.should_upgrade():
            return  # its body is still to come
        self._parsing = _Phase.IDLE
        if incoming.upload is not None:
            incoming.upload.end()
            return
        incoming.take_body(self._body.take(), self._parser.should_keep_alive())
        self._ready(incoming)

    # Answering.

    def _refuse(self, error: GatewayError) -> None:
        """Answer the request being parsed with an error, after the answers before it, and parse nothing more."""
        if self._deaf:
            return
        self._deaf = True
        if self._parsing is _Phase.IDLE:
            self._incoming = HttpRequest()  # the last one is complete and valid
        self._body.drop()
        if self._incoming.upload is not None:
            self._incoming.upload.end(error)
            return
        self._incoming.refuse(error, self._parser.get_method() if self._parsing is _Phase.HEAD else None)
        self._ready(self._incoming)

    def _ready(self, incoming: HttpRequest) -> None:
        if self._task is not None or self.blocked or self._pipelined or not self._begin(incoming):
            self._pipelined.append(incoming)

    def _begin(self, incoming: HttpRequest) -> bool:
        """Begin the first answer that is due, unless the host has too many to begin. Returns whether it has begun."""
        route, is_only = incoming.route, not self._stash and len(self._pipelined) <= 1
        is_probe = route is not None and route.public and is_only
        self._is_beginning = not is_probe and self._host.beginnings.may_begin(self)
        if not incoming.arrived_seconds:
            incoming.arrived(self._loop.time())
        if not (is_probe or self._is_beginning):
            return False
        self._task = self._loop.create_task(self._answer(incoming))
        return True

    async def _answer(self, incoming: HttpRequest) -> None:
        if self._is_beginning:
            self._is_beginning = False
            self._host.beginnings.begun()
        try:
            if self._transport is not None:  # else the client left before this task began
                await self._host.handler.serve(incoming, self)
        finally:
            self._task = None
            incoming.end(self._holding)
            reply, self.reply = self.reply, None
            if self._transport is not None:
                if reply is None or not reply.complete:
                    self.close()
                elif not reply.keep_alive:
                    self._linger(incoming)
                else:
                    self._next()

    def _linger(self, incoming: HttpRequest) -> None:
        """Close after a refusal only once the client had time to read it: unread bytes would reset the connection."""
        if incoming.error is None and incoming.upload is None:
            self.close()
            return
        self._drop_pending()
        self.read_more(True)
        self._parsing = _Phase.LINGER
        self._since = self._loop.time()
        if self._transport is not None and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def _next(self) -> None:
        if self._pipelined:
            if self.blocked:
                return  # backpressure: do not buffer more answers
            if self._begin(self._pipelined[0]):
                self._pipelined.popleft()
        elif self._deaf:
            self.close()
        else:
            self._since = self._loop.time()
            if self._give is not None:
                self._loop.call_soon(self.look_idle)
        if self._stash and not self._pipelined:
            data = bytes(self._stash)
            self._stash.clear()
            self._holding.shrink(len(data))
            self.read_more(True)
            self.data_received(data)


def _refusal(error: Exception) -> GatewayError:
    """The error for the exception in a callback of the parser, whose traceback has the caller's frame."""
    cause = error.__context__
    return cause if isinstance(cause, GatewayError) else InvalidRequest(f"Malformed request: {error}.")
