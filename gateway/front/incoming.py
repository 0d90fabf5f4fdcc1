"""One request as it came over the wire: the few header fields that matter, and the body."""

import re

from gateway.config import KeyConfig
from gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest
from gateway.front.routes import Route
from gateway.front.upload import Upload

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
