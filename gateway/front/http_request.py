"""One HTTP request: the header fields that matter, and the body that is being received: size, framing, pace."""

import re

from gateway.config import KeyConfig, ServerConfig
from gateway.errors import BodyTooLarge, GatewayError, HeadersTooLarge, InvalidRequest, RequestTimeout
from gateway.front.routes import Route
from gateway.front.uploads import Upload
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


class Incoming:
    """A request being read, or refused (`error`). `upload` is set when the body is passed on while it arrives.

    Defaults stand in the class, so that making one costs only what is set.
    """

    method: bytes = b""
    path: bytes = b""
    http10: bool = False
    keep_alive: bool = False
    body: bytes = b""
    held_bytes: int = 0  # of the memory budget, until the request has ended
    upload: Upload | None = None
    max_body_bytes: int = 0
    error: GatewayError | None = None
    arrived_seconds: float = 0.0
    route: Route | None = None
    key: KeyConfig | None = None

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}

    def take_head(
        self,
        method: bytes,
        version: str,
        headers: list[tuple[bytes, bytes]],
        known: frozenset[bytes] = KNOWN_HEADERS,
    ) -> None:
        """Keep what matters of a head. Raises InvalidRequest or HeadersTooLarge."""
        self.method = method
        kept = self.headers
        if not self.path.startswith(b"/"):
            self.path = _origin_form(self.path)
        for name, value in headers:
            if len(value) > _MAX_VALUE_BYTES or len(name) > _MAX_VALUE_BYTES:
                raise HeadersTooLarge(f"A request header exceeds the limit of {_MAX_VALUE_BYTES} bytes.")
            name = name.lower()
            if name in known:
                if name in kept and name not in _MAY_REPEAT:
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
    """One for each connection, started anew for each request.

    Its bytes are reserved in the connection's `holding` as they arrive. They stay reserved after `take`, for as long as
    the request is waiting or in progress.
    """

    __slots__ = (
        "_began_seconds", "_dry_bytes", "_holding", "_joined", "_kept_bytes", "_length", "_limit_bytes",
        "_looked_seconds", "_pieces", "_seen_bytes", "_window_bytes", "_window_seconds", "_wire_bytes", "size_bytes",
    )  # fmt: skip

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self.start(0, 0, 0.0)

    def start(self, limit_bytes: int, length: int, now: float) -> None:
        """A head is complete. `length`: as its Content-Length says; 0 if it has none."""
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._length = length
        self._pieces: list[bytes] = []
        self._joined: bytearray | None = (
            None  # instead of many pieces: an object for each small one takes 10 times more
        )
        self._kept_bytes = 0
        self._wire_bytes = self._dry_bytes = self._seen_bytes = 0
        self._began_seconds = self._looked_seconds = self._window_seconds = now
        self._window_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How much is still to come of a body of known length."""
        return self._length - self.size_bytes

    def arrived(self, size_bytes: int) -> None:
        """Count bytes of the body. Raises BodyTooLarge."""
        self.size_bytes += size_bytes
        if self.size_bytes > self._limit_bytes:
            raise too_large(self._limit_bytes)

    def keep(self, data: bytes) -> None:
        """Keep bytes of the body. Raises MemoryFull."""
        self._holding.add(len(data))
        self._kept_bytes += len(data)
        if self._joined is not None:
            self._joined += data
            return
        self._pieces.append(data)
        if len(self._pieces) > _MANY_PIECES:
            self._joined = bytearray().join(self._pieces)
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
        pieces = self._pieces
        body = bytes(self._joined) if self._joined is not None else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._clear()
        return body

    def drop(self) -> None:
        """Discard what has been kept: the request is refused."""
        self._holding.shrink(self._kept_bytes)
        self._clear()

    def _clear(self) -> None:
        self._pieces.clear()
        self._joined = None
        self._kept_bytes = 0

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
    """The error for a body over the limit of its route; 0 = the route takes none."""
    if not limit_bytes:
        return BodyTooLarge("This URL accepts no request body: send the request without one.")
    return BodyTooLarge(f"The request body exceeds the limit of {limit_bytes} bytes.")
