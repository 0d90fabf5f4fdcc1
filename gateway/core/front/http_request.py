"""One HTTP request: its head, and the headers and keys that decide when the request is served."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Protocol

from gateway.config import ServerConfig
from gateway.core.errors import GatewayError, HeadersTooLarge, InvalidRequest, UnsupportedEncoding
from gateway.core.front.body import Upload, too_large
from gateway.core.front.origin import FORWARDED_FOR, ORIGIN, USER_AGENT
from gateway.core.front.routes import CORE_ROUTES, PREFLIGHT_ROUTE, Route, RouteTable
from gateway.core.request import Kind
from gateway.core.resources import Holding

_BODY_HEADERS = (b"content-encoding", b"content-length", b"content-type", b"expect", b"transfer-encoding")
_NAMING_HEADERS = (b"authorization", b"host", b"traceparent", b"tracestate", b"x-api-key", b"x-request-id")
_PLACING_HEADERS = (
    b"x-data-parallel-rank",
    b"x-gateway-explain",
    b"x-gateway-fallback",
    b"x-gateway-priority",
    b"x-session-id",
)
_WAITING_HEADERS = (b"x-gateway-deadline-ms", b"x-stainless-read-timeout", b"x-stainless-timeout")
_UPGRADE_HEADERS = (ORIGIN, b"upgrade", b"sec-websocket-key", b"sec-websocket-protocol", b"sec-websocket-version")
KNOWN_HEADERS = frozenset((*_UPGRADE_HEADERS, *_BODY_HEADERS, *_NAMING_HEADERS, *_PLACING_HEADERS, *_WAITING_HEADERS))
MAX_HEADERS = 128
_MAX_VALUE_BYTES = 8190
_PROTOCOL_KEY = b"openai-insecure-api-key."
_AUTHORITY = re.compile(rb"[^/?#@]+(?=[/?]|$)")
_NO_ENCODINGS = frozenset((b"", b"identity", b"utf-8"))  # clients' names for "not encoded"
_MAY_REPEAT = frozenset((b"traceparent", b"tracestate", USER_AGENT))


class ClientKey(Protocol):
    """The API key of a client: its permissions, and the treatment of its requests."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> Sequence[str] | None:
        """Models that it may use, by the names that clients use; None = all."""

    @property
    def isolate_cache(self) -> bool: ...

    @property
    def weight(self) -> float: ...

    @property
    def priority(self) -> str: ...

    @property
    def expires_at(self) -> datetime | None:
        """When it becomes invalid; None = never."""

    def allows(self, model: str) -> bool:
        """Whether it may use a model, by the name that clients use."""


KeyCheck = Callable[[Mapping[bytes, bytes]], ClientKey]  # the API key of a request with these headers, or Unauthorized


class HttpRequest:
    """A request being read, or refused (`error`). `upload` is set when the body is passed on while it arrives.

    Defaults are class attributes: creating a request costs only what is set.
    """

    method: bytes = b""
    path: bytes = b""
    http10: bool = False
    upgrades: bool = False  # another protocol may follow
    keep_alive: bool = False
    body: bytes = b""
    held_bytes: int = 0  # of the memory budget, for the body and derived values, until `end`
    upload: Upload | None = None
    max_body_bytes: int = 0
    error: GatewayError | None = None
    arrived_seconds: float = 0.0  # when it was complete and ready for its answer, on the loop's clock
    route: Route | None = None
    trace_line: bytes = b""  # the `traceparent` that backends get, if the gateway traces requests

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.key: ClientKey | None = None

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
            elif b"_" in name and name.replace(b"_", b"-") in known and name != b"user_agent":
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

    def follow_trace(self, line: bytes) -> None:
        self.trace_line = line

    def admit(self, check_key: KeyCheck | None, config: ServerConfig, routes: RouteTable = CORE_ROUTES) -> bool:
        """Find the route, check the key and the body's length and encoding. True = the body is streamed.

        Raises a GatewayError.
        """
        headers = self.headers
        is_preflight = self.method == b"OPTIONS" and config.cors_origins and ORIGIN in headers
        self.route = route = PREFLIGHT_ROUTE if is_preflight else routes.find(self.method, self.path)
        if check_key is not None and not route.public:
            self.key = check_key(with_protocol_key(headers) if route.upgrades else headers)
        encoding = headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() not in _NO_ENCODINGS:
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

    def end(self, holding: Holding) -> None:
        """It is answered, or never will be: drop its data, and return the memory to `holding`."""
        self.body = b""
        holding.shrink(self.held_bytes)
        self.held_bytes = 0
        if self.upload is not None:
            self.upload.close()

    def stream_body(self, upload: Upload) -> None:
        self.upload = upload

    def arrived(self, now: float) -> None:
        self.arrived_seconds = now

    def upgrade(self, early_bytes: int) -> bool:
        """The client requests another protocol. Returns whether its route has one; `early_bytes` came early."""
        self.upgrades = self.route is not None and self.route.upgrades
        if self.upgrades and early_bytes:
            self.refuse(InvalidRequest("The client sent data before the upgrade was answered."))
        return self.upgrades

    def refuse(self, error: GatewayError, method: bytes | None = None) -> None:
        """The request is answered with this error, then the connection is closed. `method`: of an incomplete head."""
        self.error = error.again()
        self.keep_alive = False
        if method is not None:
            self.method = method


def with_protocol_key(headers: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The headers with the API key of a browser, which can set no headers but a WebSocket's protocols."""
    if b"authorization" not in headers:
        for protocol in headers.get(b"sec-websocket-protocol", b"").split(b","):
            name, _, key = protocol.strip().partition(_PROTOCOL_KEY)
            if key and not name:
                return {**headers, b"authorization": b"Bearer " + key}
    return headers


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


_SANE_NAME = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
_POSITIVE = re.compile(rb"(?=[0-9.]*[1-9])[0-9]{1,12}(?:\.[0-9]{1,9})?")
# The timeout of the client in seconds, as sent by the SDKs of OpenAI and Anthropic for Python and for Node.
_SDK_TIMEOUTS: Final[tuple[bytes, ...]] = (b"x-stainless-read-timeout", b"x-stainless-timeout")


class SchedulingHeaders:
    """Reads a request's tenant, weight, class and deadline from its headers and API key.

    `tenant_header`: empty = none. `comment_seconds`: the interval of keep-alive comments to silent streams; 0 = none.
    """

    def __init__(self, tenant_header: str = "", comment_seconds: float = 0.0) -> None:
        self._tenant_header = tenant_header.lower().encode()
        self._comment_seconds = comment_seconds

    def owner(self, incoming: HttpRequest) -> tuple[str, str]:
        """The API key's name and the tenant: a client's stored data belongs to both."""
        key = incoming.key
        return key.name if key is not None else "", self._tenant(incoming.headers, key)

    def read(self, incoming: HttpRequest, *, streams: bool) -> tuple[str, float, bool, float | None]:
        """Tenant, weight, whether it is a batch request, and deadline in seconds. Raises InvalidRequest."""
        headers, key = incoming.headers, incoming.key
        weight, batch = (1.0, False) if key is None else (key.weight, key.priority == "batch")
        priority = headers.get(b"x-gateway-priority")
        if priority is not None:
            if priority.strip().lower() not in (b"interactive", b"batch"):
                raise InvalidRequest("The header X-Gateway-Priority must be interactive or batch.")
            # a client can lower its class, not raise it above its key's
            batch = batch or priority.strip().lower() == b"batch"
        deadline_seconds = _deadline(headers, incoming.arrived_seconds, self._comment_seconds if streams else 0.0)
        return self._tenant(headers, key), weight, batch, deadline_seconds

    def _tenant(self, headers: dict[bytes, bytes], key: ClientKey | None) -> str:
        name = headers[self._tenant_header].strip() if self._tenant_header in headers else b""
        if not name:
            return key.name if key is not None else ""
        if _SANE_NAME.fullmatch(name):
            return name.decode()
        return f"sha256-{hashlib.sha256(name).hexdigest()[:16]}"


def _deadline(headers: dict[bytes, bytes], arrived_seconds: float, comment_seconds: float) -> float | None:
    """When the answer must have begun, if the client says so.

    An SDK's timeout limits the time without data, so it sets no deadline where comments are sent more often.
    """
    value = headers.get(b"x-gateway-deadline-ms")
    if value is not None:
        if not _POSITIVE.fullmatch(value.strip()):
            raise InvalidRequest("The header X-Gateway-Deadline-Ms must be a positive number of milliseconds.")
        return arrived_seconds + float(value) / 1000
    for name in _SDK_TIMEOUTS:
        if (value := headers.get(name)) is None:
            continue
        try:
            seconds = float(value)
        except ValueError:
            continue
        if 0 < seconds < math.inf:
            return None if 0 < comment_seconds < seconds else arrived_seconds + seconds
    return None
