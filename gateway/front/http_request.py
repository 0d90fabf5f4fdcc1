"""One HTTP request: its route and its head.

The table of methods and paths is exact: everything else is rejected, in any spelling.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gateway.config import ServerConfig
from gateway.config.keys import KeyConfig
from gateway.errors import (
    GatewayError,
    HeadersTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    UnsupportedEncoding,
)
from gateway.front.body import Upload, too_large
from gateway.front.origin import FORWARDED_FOR, ORIGIN, USER_AGENT
from gateway.request import DONE_MARKER, Kind


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. `target` is sent to the backend as it is here; `done_marker` ends a complete event stream."""

    endpoint: str
    kind: Kind = Kind.LIGHT
    target: bytes = b""
    done_marker: bytes | None = None
    local: bool = False  # the gateway answers it itself
    anthropic: bool = False
    public: bool = False  # no API key needed
    injects_usage: bool = False
    stored: bool = False  # for a response that one backend stores
    max_body_bytes: int | None = 0  # None = as configured
    streams: bool = False  # the stored response is requested as a stream
    by_body: bool = False  # which endpoint it is, the fields of the body decide
    bodiless: bool = False  # relayed without a body
    upgrades: bool = False  # to a WebSocket


_MAX_PARAMETERS = 16
_EMPTY_BODY_BYTES = 64  # some clients send {} where no body is needed


def _table() -> dict[tuple[bytes, bytes], Route]:
    score, rerank = Route("score", Kind.POOL), Route("rerank", Kind.POOL)
    posts = {
        b"/v1/chat/completions": Route("chat", Kind.GENERATE, done_marker=DONE_MARKER, injects_usage=True),
        b"/v1/chat/completions/batch": Route("chat_batch", Kind.GENERATE),
        b"/v1/completions": Route("completions", Kind.GENERATE, done_marker=DONE_MARKER, injects_usage=True),
        b"/v1/responses": Route("responses", Kind.GENERATE),
        b"/v1/messages": Route("messages", Kind.GENERATE, done_marker=b"event: message_stop", anthropic=True),
        b"/v1/embeddings": Route("embeddings", Kind.POOL),
        b"/v1/score": score,
        b"/score": score,
        b"/v1/rerank": rerank,
        b"/rerank": rerank,
        b"/v2/rerank": rerank,
        b"/v2/embed": Route("embed", Kind.POOL),
        b"/pooling": Route("pooling", Kind.POOL),
        b"/classify": Route("classify", Kind.POOL),
        b"/generative_scoring": Route("generative_scoring", Kind.POOL),
        b"/invocations": Route("invocations", by_body=True),
        b"/v1/messages/count_tokens": Route("count_tokens", anthropic=True),
        b"/tokenize": Route("tokenize"),
        b"/detokenize": Route("detokenize"),
        b"/v1/audio/transcriptions": Route("transcriptions", Kind.UPLOAD, done_marker=DONE_MARKER),
        b"/v1/audio/translations": Route("translations", Kind.UPLOAD, done_marker=DONE_MARKER),
    }
    ready = Route("readyz", local=True, public=True)
    gets = {
        b"/v1/models": Route("models", local=True),
        b"/livez": Route("livez", local=True, public=True),
        b"/readyz": ready,
        b"/health": ready,
        b"/ping": ready,
        b"/version": Route("version", local=True),
        b"/load": Route("load", local=True),
        b"/v1/realtime": Route("realtime", Kind.GENERATE, b"/v1/realtime", upgrades=True),
        b"/tokenizer_info": Route("tokenizer_info", target=b"/tokenizer_info", bodiless=True),
    }
    table = {(b"POST", path): replace(route, target=path, max_body_bytes=None) for path, route in posts.items()}
    table |= {(b"POST", b"/ping"): ready} | {(b"GET", path): route for path, route in gets.items()}
    table |= {(b"HEAD", path): route for path, route in gets.items() if route.local}
    # HAProxy's checks are OPTIONS unless it is told otherwise.
    return table | {(b"OPTIONS", path): route for path, route in gets.items() if route.public}


ROUTES = _table()
_PREFLIGHT = Route("preflight", local=True, public=True)  # a browser asks whether a page may send a request
_ALLOWED = {path: b", ".join(method for method, other in ROUTES if other == path).decode() for _, path in ROUTES}
# Whose fields are in a body for /invocations, in the order in which vLLM tries them.
_INVOKED: dict[str, bytes] = {
    "messages": b"/v1/chat/completions",
    "prompt": b"/v1/completions",
    "input": b"/v1/embeddings",
    "documents": b"/v1/rerank",
    "text_2": b"/v1/score",
}
_MODEL = re.compile(rb"/v1/models/([A-Za-z0-9._:@%/+-]{1,512})")
_RESPONSE = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")
# The query parameters that reach a backend, and their valid values.
_BOOLEAN, _PATH_OF_FIELD = re.compile(rb"true|false"), re.compile(rb"[a-z_.]{1,64}")
_QUERY = {
    b"stream": _BOOLEAN,
    b"include_obfuscation": _BOOLEAN,
    b"starting_after": re.compile(rb"[0-9]{1,18}"),
    **dict.fromkeys((b"include", b"include[]", b"include%5B%5D"), _PATH_OF_FIELD),
}


def invoked_route(document: Mapping[str, object]) -> Route:
    """The endpoint that a body for /invocations is for. Raises InvalidRequest."""
    for field, path in _INVOKED.items():
        if field in document:
            return ROUTES[b"POST", path]
    raise InvalidRequest(f"A body for /invocations needs one of the fields {', '.join(_INVOKED)}.")


def find_route(method: bytes, path: bytes) -> Route:
    """The route of a request. Only query parameters of stored responses are kept.

    Raises RouteNotFound, MethodNotAllowed or InvalidRequest.
    """
    if route := ROUTES.get((method, path)):
        return route
    path, _, query = path.partition(b"?")
    if route := ROUTES.get((method, path)):
        return route
    if method == b"GET" and _MODEL.fullmatch(path):
        return Route("model", local=True, target=path)
    if (match := _RESPONSE.fullmatch(path)) and method == (b"POST" if match[2] else b"GET"):
        passed = {} if match[2] else _passed(query)
        target = path + b"?" + b"&".join(passed.values()) if passed else path
        return Route(
            "responses",
            target=target,
            stored=True,
            max_body_bytes=_EMPTY_BODY_BYTES if match[2] else 0,
            streams=passed.get(b"stream") == b"stream=true",
        )
    shown = path[:200].decode("ascii", "replace") if path.startswith(b"/") else "(not a path)"
    if path in _ALLOWED:
        allow = _ALLOWED[path]
        raise MethodNotAllowed(
            f"Method {method.decode('ascii', 'replace')} is not allowed for {shown}; use {allow}.", allow=allow
        )
    raise RouteNotFound(f"Unknown request URL: {method.decode('ascii', 'replace')} {shown}.")


def _passed(query: bytes) -> dict[bytes, bytes]:
    """The parts of a query string that are passed on: of each parameter the last one, and all those of `include`."""
    passed: dict[bytes, bytes] = {}
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        pattern = _QUERY.get(name)
        if pattern is not None:
            if not pattern.fullmatch(value):
                allowed = pattern.pattern.decode()
                raise InvalidRequest(f"Invalid query parameter {name.decode()}: it must match {allowed}.")
            passed[part if pattern is _PATH_OF_FIELD else name] = part
            if len(passed) > _MAX_PARAMETERS:
                raise InvalidRequest(f"The query exceeds the limit of {_MAX_PARAMETERS} parameters.")
    return passed


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
_MAY_REPEAT = frozenset((b"traceparent", b"tracestate", USER_AGENT))
KeyCheck = Callable[[Mapping[bytes, bytes]], KeyConfig]  # the API key of a request with these headers, or Unauthorized


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
    held_bytes: int = 0  # of the memory budget, until the request has ended
    upload: Upload | None = None
    max_body_bytes: int = 0
    error: GatewayError | None = None
    arrived_seconds: float = 0.0  # when it was complete and ready for its answer, on the loop's clock
    route: Route | None = None
    key: KeyConfig | None = None
    trace_line: bytes = b""  # the `traceparent` that backends get, if the gateway traces requests

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

    def admit(self, check_key: KeyCheck | None, config: ServerConfig) -> bool:
        """Find the route, check the key and the body's length and encoding. True = the body is streamed.

        Raises a GatewayError.
        """
        headers = self.headers
        is_preflight = self.method == b"OPTIONS" and config.cors_origins and ORIGIN in headers
        self.route = route = _PREFLIGHT if is_preflight else find_route(self.method, self.path)
        if check_key is not None and not route.public:
            self.key = check_key(with_protocol_key(headers) if route.upgrades else headers)
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

    def stream_body(self, upload: Upload) -> None:
        self.upload = upload

    def arrived(self, now: float) -> None:
        self.arrived_seconds = now

    def upgrade(self, early_bytes: int) -> bool:
        """The client asks for another protocol. Returns whether its route has one; `early_bytes` came before that."""
        self.upgrades = self.route is not None and self.route.upgrades
        if self.upgrades and early_bytes:
            self.refuse(InvalidRequest("The client sent data before the upgrade was answered."))
        return self.upgrades

    def refuse(self, error: GatewayError, method: bytes | None = None) -> None:
        """The request is answered with this error, then the connection is closed. `method`: of an incomplete head."""
        self.error = error
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
