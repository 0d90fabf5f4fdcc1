"""One request as it came over the wire: the few header fields that matter, and the body."""

from gateway.config import KeyConfig
from gateway.errors import GatewayError, InvalidRequest
from gateway.front.routes import Route
from gateway.front.upload import Upload

KNOWN_HEADERS = frozenset(
    (b"authorization", b"content-encoding", b"content-length", b"content-type", b"expect", b"host", b"traceparent",
     b"tracestate", b"transfer-encoding", b"x-api-key", b"x-request-id", b"x-session-id")
)  # fmt: skip
_ONLY_ONCE = KNOWN_HEADERS - {b"traceparent", b"tracestate"}


class Incoming:
    """A request being read, or refused (`error`). `upload` is set when the body is passed on while it arrives.

    Defaults stand in the class, so that making one costs only what is set.
    """

    method: bytes = b""
    path: bytes = b""
    http10: bool = False
    keep_alive: bool = False
    body: bytes = b""
    upload: Upload | None = None
    max_body_bytes: int = 0
    error: GatewayError | None = None
    arrived_seconds: float = 0.0
    route: Route | None = None
    key: KeyConfig | None = None

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}

    def take_header(self, name: bytes, value: bytes) -> None:
        """Keep a header that matters; `name` in lower case. Raises InvalidRequest for a second one of a kind."""
        if name in KNOWN_HEADERS:
            if name in self.headers and name in _ONLY_ONCE:
                raise InvalidRequest(f"The header {name.decode()} is there twice.")
            self.headers[name] = value

    def close_out_head(self, version: str) -> None:
        """Checks that need the whole head. Raises InvalidRequest."""
        headers = self.headers
        if version not in ("1.1", "1.0"):
            raise InvalidRequest(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
        self.http10 = version == "1.0"
        if b"host" not in headers and not self.http10:
            raise InvalidRequest("The Host header is missing.")
        transfer = headers.get(b"transfer-encoding")
        if transfer is not None and (self.http10 or transfer.lower() != b"chunked"):
            raise InvalidRequest("The only Transfer-Encoding accepted is chunked, in HTTP/1.1.")
        expect = headers.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            raise InvalidRequest("The only Expect accepted is 100-continue.")
