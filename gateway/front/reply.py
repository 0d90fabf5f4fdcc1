"""The answer to one request, as bytes on the client's connection; and errors in the shape that clients expect."""

from collections.abc import Callable
from http import HTTPStatus
from math import ceil
from typing import Any, Protocol

import orjson

from gateway.errors import BackendFault, GatewayError, MethodNotAllowed, Unauthorized

JSON = b"application/json"
_EVENTS = b"text/event-stream"
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}


class Wire(Protocol):
    """The client's connection, as far as a reply needs it."""

    blocked: bool

    @property
    def address(self) -> str: ...

    def write(self, data: bytes) -> bool:
        """Send bytes; dropped when the client is gone. True = its buffer is full."""


class Reply:
    """Writes one response. `begun`: the client has part of it. `on_room` is called when a full buffer has emptied.

    A client who waits for a stream may be sent its head and comments before; that is not part of an answer yet, but
    what comes then can only be events.
    """

    __slots__ = (
        "_anthropic", "_bodiless", "_chunked", "_events", "_http10", "_opened", "_wire", "begun", "complete", "extra",
        "keep_alive", "on_room", "request_id", "standing", "status",
    )  # fmt: skip

    def __init__(
        self,
        wire: Wire,
        request_id: str,
        keep_alive: bool,
        *,
        http10: bool,
        anthropic: bool = False,
        bodiless: bool = False,
    ) -> None:
        self._wire = wire
        self._chunked = False
        self._events = False
        self._opened = False  # head and comments were sent, and nothing else
        self._http10 = http10
        self._anthropic = anthropic
        self._bodiless = bodiless  # the answer to HEAD: only errors, for no route takes it
        self.request_id = request_id
        self.keep_alive = keep_alive
        self.begun = False
        self.complete = False
        self.status = 0
        self.extra = b""
        self.standing = b""  # header lines that every answer has, errors too
        self.on_room: Callable[[], None] | None = None

    @property
    def address(self) -> str:
        return self._wire.address

    @property
    def blocked(self) -> bool:
        """The client takes no more for now."""
        return self._wire.blocked

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
        """The head of a response whose length is not known."""
        if self._opened:
            if not content_type.startswith(_EVENTS):
                self._break_off(_as_event(status, b"", self._anthropic))
            self.begun = True
            return
        self.begun = True
        self._open(status, content_type, extra)

    def comment(self) -> None:
        """Tell a client who waits for a stream, and the proxies on the way, that there is more to come."""
        if self.begun or self.complete or self._wire.blocked:
            return
        if not self._opened:
            self._opened = True
            self._open(200, _EVENTS + b"; charset=utf-8", b"")
        self.write(b": waiting\n\n")

    def _open(self, status: int, content_type: bytes, extra: bytes) -> None:
        self.status = status
        self._chunked = not self._http10
        self._events = content_type.startswith(_EVENTS)
        if not self._chunked:
            self.keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        streaming = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
        self._wire.write(
            b"%bcontent-type: %b\r\n%b%b%b\r\n" % (self._head(status), content_type, framing, streaming, extra)
        )

    def write(self, data: bytes) -> bool:
        """Body bytes of a begun response. True = the client takes no more for now."""
        return self._wire.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        self.complete = True
        if self._chunked:
            self._wire.write(b"0\r\n\r\n")

    def fail(self, error: GatewayError) -> None:
        """Tell the client of an error: a whole response, or the last event of a stream that then ends uncleanly."""
        if self.complete:
            return
        if not (self.begun or self._opened):
            self.send(error.status, JSON, error_headers(error), render(error, self._anthropic))
            return
        self._break_off(render(error, self._anthropic))

    def _break_off(self, error: bytes) -> None:
        """The last event, if events are what the client gets; nothing is written after it."""
        self.begun = True
        self.keep_alive = False
        if self._events:
            event = b"event: error\n" if self._anthropic else b""
            self.write(b"%bdata: %b\n\n" % (event, error))
        self._wire = _Nowhere()

    def _head(self, status: int) -> bytes:
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
        connection = b"" if self.keep_alive and not self._http10 else self._connection_header()
        return b"%bx-request-id: %b\r\n%b%b%b" % (
            line, self.request_id.encode(), connection, self.standing, self.extra,
        )  # fmt: skip

    def _connection_header(self) -> bytes:
        return b"connection: keep-alive\r\n" if self.keep_alive else b"connection: close\r\n"


class _Nowhere:
    """Where the rest of a response goes that was broken off."""

    address = ""
    blocked = False

    def write(self, data: bytes) -> bool:  # noqa: ARG002
        return False


def _as_event(status: int, body: bytes, anthropic: bool) -> bytes:
    """The body of a whole answer, for a client whose head says that events follow: errors alone can be told."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if isinstance(document, dict) and document.get("error"):
        return orjson.dumps(document)  # on one line, whatever it was before
    return render(BackendFault(f"The backend returned {status} without an event stream."), anthropic)


def render(error: GatewayError, anthropic: bool = False) -> bytes:
    """The error's body: OpenAI's shape, or Anthropic's for /v1/messages."""
    if anthropic:
        kind = {429: "rate_limit_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        fallback = "invalid_request_error" if error.status < 500 else "api_error"
        kind_name = "overloaded_error" if error.status in (503, 529) else kind.get(error.status, fallback)
        return orjson.dumps({"type": "error", "error": {"type": kind_name, "message": error.message}})
    body: dict[str, Any] = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return orjson.dumps({"error": body})


def error_headers(error: GatewayError) -> bytes:
    """Whether and when to come back; how to give a key; which method is right."""
    lines = b"x-should-retry: false\r\n" if error.hopeless else b""
    if error.retry_after_seconds is not None:
        milliseconds = max(1, ceil(error.retry_after_seconds * 1000 - 1e-6))
        return lines + b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (-(-milliseconds // 1000), milliseconds)
    if isinstance(error, MethodNotAllowed):
        return lines + b"allow: %b\r\n" % error.allow.encode()
    return lines + b"www-authenticate: Bearer\r\n" if isinstance(error, Unauthorized) else lines
