"""The answer to one request, as bytes on the client's connection; and errors in the shape that clients expect."""

from collections.abc import Callable
from http import HTTPStatus
from math import ceil
from typing import Protocol

import orjson

from gateway.core.errors import (
    BackendFault,
    GatewayError,
    KeyExpired,
    MethodNotAllowed,
    Unauthorized,
    WebSocketRequired,
)
from gateway.core.front.origin import TrustedProxies
from gateway.core.front.routes import Route
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest, Sink, UpstreamResult

JSON = b"application/json"
_EVENTS = b"text/event-stream"
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}


class Wire(Protocol):
    """The client's connection, as the response uses it."""

    blocked: bool

    @property
    def address(self) -> str: ...

    def write(self, data: bytes) -> bool: ...


class RequestHead(Protocol):
    """The inputs that determine the form of a response."""

    http10: bool
    method: bytes
    route: Route | None


class ClientResponse(Sink):
    """Writes one response; `Sink` has the meaning of its methods. `begun`: the client has part of it.

    A client that waits for a stream may get the head and keep-alive comments earlier. That does not count as begun, but
    only events can follow.
    """

    __slots__ = (
        "_address", "_anthropic", "_bodiless", "_constant", "_events", "_farewell", "_headers", "_http10", "_opened",
        "_wire", "backend_headers", "begun", "chunked", "complete", "keep_alive", "on_writable", "request_id",
        "status",
    )  # fmt: skip

    def __init__(self, wire: Wire, request_id: str, incoming: RequestHead, keep_alive: bool) -> None:
        self._wire = wire
        self.chunked = False
        self._events = False
        self._opened = False  # head and comments were sent, and nothing else
        self._http10 = incoming.http10
        self._anthropic = incoming.route is not None and incoming.route.anthropic
        self._bodiless = incoming.method == b"HEAD"
        self._address = ""
        self._constant = self._headers = b""  # lines of every response, errors too
        self.backend_headers = b""
        self.request_id = request_id
        self.keep_alive = keep_alive
        self.begun = False
        self.complete = False
        self.status = 0
        self.on_writable: Callable[[], None] | None = None
        self._farewell: Callable[[GatewayError], bytes] | None = None  # the last bytes of another protocol

    @property
    def address(self) -> str:
        return self._address or self._wire.address

    def came_through(self, proxies: TrustedProxies, forwarded_for: bytes) -> None:
        """Take the client's address from the headers added by proxies."""
        self._address = proxies.client(self._wire.address, forwarded_for)

    @property
    def blocked(self) -> bool:
        return self._wire.blocked

    def set_headers(self, lines: bytes) -> None:
        """Header lines that the response has in any case, also if it is an error."""
        self._headers = self._constant + lines

    def set_constant_headers(self, lines: bytes) -> None:
        """Header lines that `set_headers` does not replace."""
        self._constant = self._headers = lines

    def add_headers(self, lines: bytes) -> None:
        self._headers += lines

    def set_backend_headers(self, lines: bytes) -> None:
        self.backend_headers = lines

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        self.on_writable = resume

    @property
    def sent_bytes(self) -> int:
        """Bytes of the body, if they are counted."""
        return 0

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        if self._opened:
            self._break_off(_as_event(status, body, self._anthropic))
            return
        self.begun = self.complete = True
        self.status = status
        self._wire.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
            % (self._head(status), content_type, len(body), extra, b"" if self._bodiless else body)
        )

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        """The head of a response of unknown length."""
        self.begun = True
        if not self._opened:
            self._open(status, content_type, extra)
        elif not content_type.startswith(_EVENTS):
            self._break_off(_as_event(status, b"", self._anthropic))

    def switch(self, lines: bytes, farewell: Callable[[GatewayError], bytes]) -> None:
        """Change to another protocol, whose bytes `write` sends; an error ends it with the bytes of `farewell`."""
        self.begun = self.keep_alive = True
        self.status = 101
        self._farewell = farewell
        self._wire.write(b"%b%b\r\n" % (self._head(101), lines))

    def comment(self, blank_line: bool = True) -> None:
        """Send a keep-alive comment to a client that waits for a stream, and to the proxies between."""
        if self.complete or self._wire.blocked or (self.begun and not self._events):
            return
        if not self.begun and not self._opened:
            self._opened = True
            self._open(200, _EVENTS + b"; charset=utf-8", b"")
        self.write(b": waiting\n\n" if blank_line else b": waiting\n")

    def _open(self, status: int, content_type: bytes, extra: bytes) -> None:
        self.status = status
        self._events = content_type.startswith(_EVENTS)
        framing = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
        if self._http10:
            self.keep_alive = False
        else:
            self.chunked = True
            framing = b"transfer-encoding: chunked\r\n" + framing
        self._wire.write(b"%bcontent-type: %b\r\n%b%b\r\n" % (self._head(status), content_type, framing, extra))

    def write(self, data: bytes, framed: bool = False) -> bool:
        """Body bytes of a begun response; `framed`: in chunks already. True = the client's buffer is full."""
        if self.chunked and not framed:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        return self._wire.write(data)

    def end(self) -> None:
        self.complete = True
        if self.chunked:
            self._wire.write(b"0\r\n\r\n")

    def fail(self, error: GatewayError) -> None:
        """Send an error: a whole response, or the last event of a stream, which then ends uncleanly."""
        if self.complete:
            return
        if self._farewell is not None:
            self.write(self._farewell(error))
            self._wire = _Nowhere()
        elif self.begun or self._opened:
            self._break_off(render(error, self._anthropic))
        else:
            self.send(error.status, JSON, error_headers(error), render(error, self._anthropic))

    def _break_off(self, error: bytes) -> None:
        """Write the last event, if the client gets events; nothing is written after it."""
        self.begun = True
        self.keep_alive = False
        if self._events:
            event = b"event: error\n" if self._anthropic else b""
            self.write(b"%bdata: %b\n\n" % (event, error))
        self._wire = _Nowhere()

    def _head(self, status: int) -> bytes:
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
        connection = b""
        if self._http10 or not self.keep_alive:
            connection = b"connection: keep-alive\r\n" if self.keep_alive else b"connection: close\r\n"
        request_id = self.request_id.encode()
        return b"%bx-request-id: %b\r\n%b%b%b" % (line, request_id, connection, self._headers, self.backend_headers)


class CountingResponse(ClientResponse):
    """Counts the bytes of its body, with the framing of chunks."""

    __slots__ = ("_sent_bytes",)

    def __init__(self, wire: Wire, request_id: str, incoming: RequestHead, keep_alive: bool) -> None:
        super().__init__(wire, request_id, incoming, keep_alive)
        self._sent_bytes = 0

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        self._sent_bytes = 0 if self._bodiless else len(body)
        super().send(status, content_type, extra, body)

    def write(self, data: bytes, framed: bool = False) -> bool:
        self._sent_bytes += len(data)
        return super().write(data, framed)


class _Nowhere(Wire):
    """Discards the rest of a response that was broken off."""

    address = ""
    blocked = False

    def write(self, data: bytes) -> bool:  # noqa: ARG002
        return False


def _as_event(status: int, body: bytes, anthropic: bool) -> bytes:
    """The body of a whole response as an event, for a client that already has the head of a stream: an error."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if isinstance(document, dict) and document.get("error"):
        return orjson.dumps(document)  # on one line
    return render(BackendFault(f"The backend returned {status} without an event stream."), anthropic)


def render(error: GatewayError, anthropic: bool = False) -> bytes:
    """The error's body: OpenAI's shape, or Anthropic's for /v1/messages."""
    if anthropic:
        kind = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
        }
        fallback = "invalid_request_error" if error.status < 500 else "api_error"
        kind_name = "overloaded_error" if error.status in (503, 529) else kind.get(error.status, fallback)
        return orjson.dumps({"type": "error", "error": {"type": kind_name, "message": error.message}})
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return orjson.dumps({"error": body})


def error_headers(error: GatewayError) -> bytes:
    """Whether and when to retry; how to authenticate; which method is allowed."""
    lines = b"x-should-retry: false\r\n" if error.not_retryable else b""
    if error.retry_after_seconds is not None:
        milliseconds = max(1, ceil(error.retry_after_seconds * 1000 - 1e-6))
        return lines + b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (-(-milliseconds // 1000), milliseconds)
    if isinstance(error, WebSocketRequired):
        return lines + b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
    if isinstance(error, MethodNotAllowed):
        return lines + b"allow: %b\r\n" % error.allow.encode()
    if isinstance(error, KeyExpired):
        return lines + b'www-authenticate: Bearer error="invalid_token"\r\n'
    return lines + b"www-authenticate: Bearer\r\n" if isinstance(error, Unauthorized) else lines


class RequestDispatcher(Protocol):
    """Answers requests: the dispatcher, or a part that batches or splits them first."""

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        """Answer through `reply`, and write `record` on the way. Raises a GatewayError."""
