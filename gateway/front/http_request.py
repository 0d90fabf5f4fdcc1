"""One HTTP request: its head, and the body while it is received: size, framing, pace, or an upload."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping

from gateway.config import ServerConfig
from gateway.config.keys import KeyConfig
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    UnsupportedEncoding,
)
from gateway.front.origin import FORWARDED_FOR
from gateway.front.routes import PREFLIGHT_ROUTE, Route, find_route
from gateway.request import Kind
from gateway.resources import Holding

KNOWN_HEADERS = frozenset(
    (b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"host", b"traceparent",
     b"tracestate", b"transfer-encoding", b"x-api-key", b"x-data-parallel-rank",
     b"x-gateway-deadline-ms", b"x-gateway-explain", b"x-gateway-priority", b"x-request-id", b"x-session-id",
     b"x-stainless-read-timeout", b"x-stainless-timeout")
)  # fmt: skip
MAX_HEADERS = 128
_MAX_VALUE_BYTES = 8190
_AUTHORITY = re.compile(rb"[^/?#@]+(?=[/?]|$)")
_MAY_REPEAT = frozenset((b"traceparent", b"tracestate"))
KeyCheck = Callable[[Mapping[bytes, bytes]], KeyConfig]  # the API key of a request with these headers, or Unauthorized


class HttpRequest:
    """A request being read, or refused (`error`). `upload` is set when the body is passed on while it arrives.

    Defaults are class attributes: creating a request costs only what is set.
    """

    method: bytes = b""
    path: bytes = b""
    http10: bool = False
    keep_alive: bool = False
    body: bytes = b""
    held_bytes: int = 0  # of the memory budget, until the request has ended
    upload: "Upload | None" = None
    max_body_bytes: int = 0
    error: GatewayError | None = None
    arrived_seconds: float = 0.0  # when it was complete and ready for its answer, on the loop's clock
    route: Route | None = None
    key: KeyConfig | None = None

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}

    def take_head(
        self, method: bytes, path: bytes, version: str, headers: list[tuple[bytes, bytes]], known: frozenset[bytes]
    ) -> None:
        """Keep the known headers of a head. Raises InvalidRequest or HeadersTooLarge."""
        self.method = method
        kept = self.headers
        self.path = path if path.startswith(b"/") else _origin_form(path)
        for name, value in headers:
            if len(value) > _MAX_VALUE_BYTES or len(name) > _MAX_VALUE_BYTES:
                raise HeadersTooLarge(f"A request header exceeds the limit of {_MAX_VALUE_BYTES} bytes.")
            name = name.lower()
            if name in known:
                if name == FORWARDED_FOR and name in kept:  # each proxy may add a line
                    value = kept[name] + b"," + value
                elif name in kept and name not in _MAY_REPEAT:
                    raise InvalidRequest(f"Duplicate header {name.decode()}.")
                kept[name] = value
            elif b"_" in name and name.replace(b"_", b"-") in known:
                raise InvalidRequest(
                    "Header names with underscores that collide with a known header are rejected: use hyphens."
                )
        if version != "1.1":
            if version != "1.0":
                raise InvalidRequest(f"Unsupported HTTP version {version}; use HTTP/1.1.")
            self.http10 = True
        elif b"host" not in kept:
            raise InvalidRequest("The Host header is missing.")
        transfer = kept.get(b"transfer-encoding")
        if transfer is not None and (self.http10 or transfer.lower() != b"chunked"):
            raise InvalidRequest("Unsupported Transfer-Encoding: only chunked is accepted, and only in HTTP/1.1.")
        expect = kept.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            raise InvalidRequest("Unsupported Expect header: only 100-continue is accepted.")

    def take_whole(self, method: bytes, path: bytes, headers: dict[bytes, bytes], body: bytes) -> None:
        """Keep a usual request that arrived in one piece; its connection may be used again."""
        self.method = method
        self.path = path
        self.headers = headers
        self.take_body(body, True)

    def admit(self, check_key: KeyCheck | None, config: ServerConfig) -> bool:
        """Find the route, check the key and the body's length and encoding. True = the body is streamed.

        Raises a GatewayError.
        """
        headers = self.headers
        is_preflight = self.method == b"OPTIONS" and config.cors_origins
        self.route = route = PREFLIGHT_ROUTE if is_preflight else find_route(self.method, self.path)
        if check_key is not None and not route.public:
            self.key = check_key(headers)
        encoding = headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise UnsupportedEncoding(
                "Compressed request bodies are unsupported: send the body without Content-Encoding."
            )
        streamed, limit_bytes = route.kind is Kind.UPLOAD, route.max_body_bytes
        if limit_bytes is None:
            limit_bytes = config.max_upload_bytes if streamed else config.max_body_bytes
        self.max_body_bytes = limit_bytes
        if (len(self.body) or int(headers.get(b"content-length", 0))) > limit_bytes:
            raise too_large(limit_bytes)
        return streamed

    def take_body(self, body: bytes, keep_alive: bool) -> None:
        """The request is complete. `keep_alive`: the connection may be used again."""
        self.body = body
        self.held_bytes = len(body)
        self.keep_alive = keep_alive

    def drop_body(self) -> None:
        """The request that was read has the body, perhaps in another form. Its memory stays reserved."""
        self.body = b""

    def stream_body(self, upload: "Upload") -> None:
        self.upload = upload

    def arrived(self, now: float) -> None:
        self.arrived_seconds = now

    def refuse(self, error: GatewayError, method: bytes | None = None) -> None:
        """The request is answered with this error, then the connection is closed. `method`: of an incomplete head."""
        self.error = error
        self.keep_alive = False
        if method is not None:
            self.method = method


def _origin_form(target: bytes) -> bytes:
    """The path and query of a target in absolute form (RFC 9112, 3.2.2). Others stay as they are: no route has them."""
    scheme, colon, rest = target.partition(b"://")
    if not colon or scheme.lower() not in (b"http", b"https"):
        return target
    authority = _AUTHORITY.match(rest)
    if authority is None:
        raise InvalidRequest("Invalid request target: it must be a path, or a URL without a user name.")
    path = rest[authority.end() :]
    return path if path.startswith(b"/") else b"/" + path


_MAX_FRAMING_BYTES = 131072  # besides as many bytes as the body has itself
_MAX_DRY_BYTES = 131072  # of framing or trailers in a row
_MANY_PIECES = 16


class Body:
    """The body of the request being received; one object per connection, restarted for each request.

    Its bytes are reserved in the connection's `holding` as they arrive, and stay reserved after `take` until the
    request has ended. `left_bytes`: what is still to come of a body of known length.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._pieces: list[bytes] = []
        self._joined = bytearray()  # earlier ones than the pieces: an object for each would take 10 times the memory
        self.start(0, 0, 0.0)

    def start(self, limit_bytes: int, length: int, now: float, upload: "Upload | None" = None) -> None:
        """A head is complete. `length`: its Content-Length; 0 = none. `upload` gets the body, if there is one."""
        self.size_bytes = 0
        self.left_bytes = length
        self._limit_bytes = limit_bytes
        self._upload = upload
        self._wire_bytes = self._dry_bytes = self._seen_bytes = 0
        self._began_seconds = self._looked_seconds = self._window_seconds = now
        self._window_bytes = 0

    def receive(self, data: bytes) -> None:
        """Keep bytes of the body, or pass them on. Raises BodyTooLarge or MemoryFull."""
        size_bytes = len(data)
        self.size_bytes += size_bytes
        self.left_bytes -= size_bytes
        if self.size_bytes > self._limit_bytes:
            raise too_large(self._limit_bytes)
        if self._upload is not None:
            self._upload.feed(data)
            return
        self._holding.add(size_bytes)
        self._pieces.append(data)
        if len(self._pieces) > _MANY_PIECES:
            self._joined += b"".join(self._pieces)
            self._pieces.clear()

    def framed(self, wire_bytes: int) -> None:
        """Count what arrived of the body with its framing. Raises InvalidRequest if that is mostly framing."""
        self._wire_bytes += wire_bytes
        self._dry_bytes = self._dry_bytes + wire_bytes if self._seen_bytes == self.size_bytes else 0
        self._seen_bytes = self.size_bytes
        if self._wire_bytes > _MAX_FRAMING_BYTES + 2 * self.size_bytes or self._dry_bytes > _MAX_DRY_BYTES:
            raise InvalidRequest(
                "Too much chunked-encoding overhead in the request body: send larger chunks without extensions."
            )

    def take(self) -> bytes:
        body = b"".join((self._joined, *self._pieces)) if self._joined else b"".join(self._pieces)
        self._pieces.clear()
        self._joined.clear()
        return body

    def drop(self) -> None:
        """Discard what has been kept: the request is refused."""
        self._holding.shrink(len(self._joined) + sum(map(len, self._pieces)))
        self._pieces.clear()
        self._joined.clear()

    def look(self, now: float, config: ServerConfig, *, held_back: bool) -> None:
        """Judge the client's pace. Called about once a second; `held_back`: nothing was read since the last time.

        Raises RequestTimeout.
        """
        if held_back:
            passed = now - self._looked_seconds
            self._began_seconds += passed
            self._window_seconds += passed
        self._looked_seconds = now
        if now - self._began_seconds > config.body_timeout_seconds:
            raise RequestTimeout(f"Timeout: the request body took over {config.body_timeout_seconds:g} s to arrive.")
        window = now - self._window_seconds
        if window > config.body_grace_seconds:
            if self.size_bytes - self._window_bytes < window * config.body_min_bytes_per_second:
                raise RequestTimeout(
                    f"The request body was too slow: under {config.body_min_bytes_per_second:g} bytes/s for"
                    f" {window:.0f} s."
                )
            self._window_seconds, self._window_bytes = now, self.size_bytes


def too_large(limit_bytes: int) -> BodyTooLarge:
    """The error for a body over the limit of its route; 0 = the route accepts none."""
    if not limit_bytes:
        return BodyTooLarge("This URL accepts no request body: send the request without one.")
    return BodyTooLarge(f"The request body exceeds the limit of {limit_bytes} bytes.")


_HELD_UPLOAD_BYTES = 1048576
_PIECE_BYTES = 65536


class Upload:
    """A body that is passed on while it arrives; what is buffered here is reserved in `holding`.

    `read_more(False)` is called when the buffer is full, `read_more(True)` when it has space again.
    """

    def __init__(self, read_more: Callable[[bool], None], holding: Holding) -> None:
        self.ended = False  # nothing more will arrive
        self.came_bytes = 0  # in all
        self._on_end: Callable[[], None] | None = None
        self._read_more = read_more
        self._holding = holding
        self._buffer = bytearray()
        self._closed = False
        self._error: GatewayError | None = None
        self._arrival = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        if self._closed:
            return
        self._holding.add(len(data))
        self.came_bytes += len(data)
        self._buffer += data
        self._arrival.set()
        if len(self._buffer) >= _HELD_UPLOAD_BYTES:
            self._read_more(False)

    def end(self, error: GatewayError | None = None) -> None:
        """The body is complete, or will never be."""
        self.ended = True
        self._error = error
        self._arrival.set()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def when_ended(self, on_end: Callable[[], None] | None) -> bool:
        """Call this once when nothing more will arrive. Returns whether the one before was not called yet."""
        was_set = self._on_end is not None
        self._on_end = on_end
        return was_set

    def close(self) -> None:
        """Discard what is buffered and what still arrives. Idempotent."""
        self._closed = True
        self._holding.shrink(len(self._buffer))
        self._buffer.clear()
        self._arrival.set()

    def put_back(self, pieces: list[bytes]) -> None:
        """Return pieces that were read, to be passed on first. Raises MemoryFull."""
        if not self._closed:
            self._holding.add(sum(map(len, pieces)))
            self._buffer[:0] = b"".join(pieces)
            self._arrival.set()

    async def collected(self) -> None:
        """Wait until the body is complete or the buffer is full."""
        while not (self.ended or self._closed) and len(self._buffer) < _HELD_UPLOAD_BYTES:
            self._arrival.clear()
            await self._arrival.wait()
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._buffer:
            if self._error is not None and not self._closed:
                raise self._error
            if self._closed or self.ended:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        piece = bytes(self._buffer[:_PIECE_BYTES])
        del self._buffer[:_PIECE_BYTES]
        self._holding.shrink(len(piece))
        if len(self._buffer) < _HELD_UPLOAD_BYTES:
            self._read_more(True)
        return piece
