"""A client's HTTP/1.1 connection: bytes to requests, one at a time, with a bound on everything a client chooses.

llhttp (through httptools) finds the messages and refuses malformed ones. What the gateway does not act on is dropped
here and never travels further: no client header, path or framing reaches a backend as it came.
"""

import asyncio
import enum
import socket
from collections import deque
from typing import Protocol, cast

import httptools

from gateway.config import ServerConfig
from gateway.errors import BodyTooLarge, GatewayError, HeadersTooLarge, InvalidRequest, RequestTimeout
from gateway.front.incoming import Incoming
from gateway.front.offer import body_parser, has_body
from gateway.front.reply import Reply
from gateway.front.upload import Upload

_MAX_LINE_BYTES = 8190
_MAX_HEAD_BYTES = 65536
_MAX_PIPELINED = 16
_MAX_PIPELINED_BYTES = 1048576
_MAX_FRAMING_BYTES = 131072  # of a body, besides as many bytes as it has itself
_SLICE_BYTES = 65536
_LINGER_SECONDS = 2.0
_WRITE_BUFFER_BYTES = 262144
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # its first byte is the connection's state; Linux has it
_TCP_ESTABLISHED = 1


class Host(Protocol):
    """What a connection needs of its server."""

    config: ServerConfig
    known_headers: frozenset[bytes]

    def connected(self, connection: "ClientConnection") -> bool:
        """A client connected; False = there are too many."""

    def disconnected(self, connection: "ClientConnection") -> None:
        """It is gone."""

    def admit(self, incoming: Incoming) -> bool:
        """Judge a head before its body is read: sets `max_body_bytes`, or raises. True = the body is streamed."""

    async def serve(self, incoming: Incoming, connection: "ClientConnection") -> None:
        """Answer a request through `connection.reply`."""


class _Phase(enum.Enum):
    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    LINGER = enum.auto()


class ClientConnection(asyncio.Protocol):
    """Parses requests, runs one answer at a time in a task, and cancels it when the client leaves."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.blocked = False  # the client takes nothing more for now
        self.was_cut = False
        self.reply: Reply | None = None
        self._host = host
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._phase = _Phase.IDLE
        self._parsing = _Phase.IDLE  # how far the request being parsed is
        self._since = loop.time()  # start of the phase
        self._blocked_since = 0.0
        self._incoming = Incoming()  # being parsed
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._wire_bytes = 0  # of the body, with its framing
        self._pipelined: deque[Incoming] = deque()
        self._stash: list[bytes] = []  # pipelined bytes that are not parsed yet
        self._deaf = False  # nothing more is parsed: malformed, refused, or closing
        self._task: asyncio.Task[None] | None = None

    @property
    def answering(self) -> bool:
        """A request is being answered."""
        return self._task is not None

    @property
    def idle(self) -> bool:
        """Nothing of a request has arrived since the last answer."""
        return self._task is None and self._parsing is _Phase.IDLE

    @property
    def gone(self) -> bool:
        """The client has left."""
        return self._transport is None

    def write(self, data: bytes) -> bool:
        """Send bytes; dropped when the client is gone. True = its buffer is full."""
        if self._transport is not None:
            self._transport.write(data)
        return self.blocked

    def cut(self, error: GatewayError) -> None:
        """End whatever is going on here, telling the client why."""
        self.was_cut = True
        if self._task is not None and self.reply is not None and not self.reply.complete:
            self.reply.fail(error)
        self.close()

    def close(self) -> None:
        """Close once what is written has been sent."""
        self._deaf = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what was written and is not sent yet is lost."""
        self._deaf = True
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float) -> None:
        """Close the connection if its client has been too slow for its phase. Called about once a second."""
        config, passed = self._host.config, now - self._since
        stalled = self.blocked and now - self._blocked_since > config.write_stall_seconds
        if self._transport is not None and (stalled or self._has_left(self._transport)):
            self._transport.abort()
        elif self._phase is _Phase.IDLE and passed > config.keep_alive_seconds:
            self.close()
        elif self._phase is _Phase.HEAD and passed > config.header_timeout_seconds:
            self._refuse(RequestTimeout(f"The head of the request took over {config.header_timeout_seconds:g} s."))
        elif self._phase is _Phase.BODY:
            self._look_at_body(passed)
        elif self._phase is _Phase.LINGER and passed > _LINGER_SECONDS:
            self.close()

    def _has_left(self, transport: asyncio.Transport) -> bool:
        """While nothing is read, only the state of the socket tells that the client has closed it."""
        if transport.is_reading():
            return False
        peer = transport.get_extra_info("socket")
        if peer is None or _TCP_INFO is None:
            return False
        return bool(peer.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] != _TCP_ESTABLISHED)

    def _look_at_body(self, passed: float) -> None:
        config = self._host.config
        allowed = config.body_grace_seconds + self._body_bytes / config.body_min_bytes_per_second
        if passed > allowed:
            slow = RequestTimeout(f"The body came slower than {config.body_min_bytes_per_second:g} bytes/s.")
            if self._incoming.upload is not None:
                self._incoming.upload.end(slow)
                self._enter(_Phase.ANSWER)
            else:
                self._refuse(slow)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self._loop.time()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if not self._host.connected(self):
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """The client is gone: whatever is done for it stops."""
        self._transport = None
        self._deaf = True
        self.blocked = False
        if self._incoming.upload is not None:
            self._incoming.upload.end(InvalidRequest("The client left before its upload was complete."))
        if self._task is not None:
            self._task.cancel()
        self._host.disconnected(self)

    def pause_writing(self) -> None:
        """The client's buffer is full."""
        self.blocked = True
        self._blocked_since = self._loop.time()

    def resume_writing(self) -> None:
        """The client's buffer has emptied."""
        self.blocked = False
        if self.reply is not None and self.reply.on_room is not None:
            self.reply.on_room()
        if self._task is None and self._pipelined:
            self._next()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._deaf:
            return
        for start in range(0, len(data), _SLICE_BYTES):
            if self._stash or self._far_ahead:
                self._stash.append(data[start:])
                self._read_more(False)
                return
            self._parse(data[start : start + _SLICE_BYTES] if len(data) > _SLICE_BYTES else data)

    @property
    def _far_ahead(self) -> bool:
        """The client has sent more requests than it has taken answers to."""
        waiting = self._pipelined
        if not waiting:
            return False
        return len(waiting) >= _MAX_PIPELINED or sum(len(each.body) for each in waiting) > _MAX_PIPELINED_BYTES

    def _parse(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._parsing is _Phase.BODY:
                self._parser = body_parser(self, self._incoming.headers)
                self._parse(data[offer.args[0] :])
                return
            self._deaf = True  # the request itself is complete; what follows would be another protocol
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, GatewayError) else InvalidRequest(f"Malformed request: {error}."))
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"Malformed HTTP: {error}."))
        if self._parsing is _Phase.HEAD:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(HeadersTooLarge(f"The head of the request is larger than {_MAX_HEAD_BYTES} bytes."))
        elif self._parsing is _Phase.BODY:
            self._wire_bytes += len(data)
            if self._wire_bytes - self._body_bytes > _MAX_FRAMING_BYTES + self._body_bytes:
                self._refuse(InvalidRequest("The body is cut into too many chunks, or has too much besides."))
        if self._task is None and self._phase is not self._parsing and not self._deaf:
            self._enter(self._parsing)

    def _read_more(self, more: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if more and not transport.is_reading():
            transport.resume_reading()
        elif not more and transport.is_reading():
            transport.pause_reading()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._incoming = Incoming()
        self._headers = []
        self._body = []
        self._head_bytes = self._body_bytes = self._wire_bytes = 0
        self._parsing = _Phase.HEAD

    def on_url(self, url: bytes) -> None:
        """The request target, in one or more pieces."""
        self._incoming.path += url
        if len(self._incoming.path) > _MAX_LINE_BYTES:
            raise HeadersTooLarge(f"The request line is longer than {_MAX_LINE_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The end of the head: refuse what can be refused before the body is read."""
        incoming = self._incoming
        incoming.take_head(
            self._parser.get_method(), self._parser.get_http_version(), self._headers, self._host.known_headers
        )
        if self._host.admit(incoming):
            incoming.upload = Upload(self._read_more)
        expect = incoming.headers.get(b"expect")
        if expect is not None and not self._pipelined and self._task is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._parsing = _Phase.BODY
        if incoming.upload is not None:
            incoming.keep_alive = False
            self._ready(incoming)

    def on_body(self, data: bytes) -> None:
        """Body bytes."""
        self._body_bytes += len(data)
        if self._body_bytes > self._incoming.max_body_bytes:
            error = BodyTooLarge(f"The body is larger than {self._incoming.max_body_bytes} bytes.")
            if self._incoming.upload is not None:
                self._incoming.upload.end(error)
            raise error
        if self._incoming.upload is not None:
            self._incoming.upload.feed(data)
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """The request is complete."""
        incoming = self._incoming
        if not self._body_bytes and has_body(incoming.headers) and self._parser.should_upgrade():
            return  # its body is still to come
        self._parsing = _Phase.IDLE
        if incoming.upload is not None:
            incoming.upload.end()
            self._enter(_Phase.ANSWER)
            return
        incoming.keep_alive = self._parser.should_keep_alive()
        incoming.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._ready(incoming)

    # Answering.

    def _refuse(self, error: GatewayError) -> None:
        """Answer the request being parsed with an error, after those before it, and parse nothing more."""
        if self._deaf:
            return
        self._deaf = True
        if self._parsing is _Phase.IDLE:
            self._incoming = Incoming()  # the last one is complete and not to blame
        if self._incoming.upload is not None and self._task is not None:
            self._incoming.upload.end(error)
            return
        self._incoming.error = error
        self._incoming.keep_alive = False
        self._ready(self._incoming)

    def _ready(self, incoming: Incoming) -> None:
        if self._task is not None or self.blocked:
            self._pipelined.append(incoming)
            return
        is_arriving = incoming.upload is not None and self._parsing is _Phase.BODY
        self._enter(_Phase.BODY if is_arriving else _Phase.ANSWER)
        incoming.arrived_seconds = self._since
        self._task = self._loop.create_task(self._answer(incoming))

    async def _answer(self, incoming: Incoming) -> None:
        try:
            await self._host.serve(incoming, self)
        finally:
            self._task = None
            reply, self.reply = self.reply, None
            if self._transport is None:
                self._pipelined.clear()
            elif reply is None or not reply.complete:
                self._transport.close()
            elif not reply.keep_alive:
                self._linger(incoming)
            else:
                self._next()

    def _linger(self, incoming: Incoming) -> None:
        """Close after a refusal only once the client had time to read it: unread bytes would reset the connection."""
        if incoming.error is None and incoming.upload is None:
            self.close()
            return
        self._deaf = True
        self._read_more(True)
        self._enter(_Phase.LINGER)
        if self._transport is not None and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def _next(self) -> None:
        if self._pipelined:
            if not self.blocked:  # answers that the client does not take must not pile up
                self._ready(self._pipelined.popleft())
        elif self._deaf:
            self.close()
        else:
            self._enter(self._parsing)
            self._unstash()

    def _unstash(self) -> None:
        if self._stash:
            data = b"".join(self._stash)
            self._stash = []
            self._read_more(True)
            self.data_received(data)
