"""The exact table of methods and paths: everything else is rejected, in any spelling."""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType

from gateway.core.errors import InvalidRequest, MethodNotAllowed, RouteNotFound
from gateway.core.request import DONE_MARKER, Kind


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. `target` is sent to the backend as it is here; `done_marker` ends a complete event stream."""

    endpoint: str
    kind: Kind = Kind.LIGHT
    target: bytes = b""
    _: KW_ONLY
    done_marker: bytes | None = None
    local: bool = False  # the gateway answers it itself
    anthropic: bool = False
    public: bool = False  # no API key needed
    injects_usage: bool = False
    decodes: bool = False  # each of its inputs generates, and takes a slot
    salted: bool = False  # vLLM takes a `cache_salt`
    stored: bool = False  # for a response that one backend stores
    max_body_bytes: int | None = 0  # None = as configured
    streams: bool = False  # the stored response is requested as a stream
    by_body: bool = False  # which endpoint it is, the fields of the body decide
    bodiless: bool = False  # relayed without a body
    upgrades: bool = False  # to a WebSocket
    answered_by: str = ""  # of a local one: the feature that does; empty = the gateway itself
    source: str = ""  # the feature that reads its requests; empty = the gateway itself


_MAX_PARAMETERS = 16
_EMPTY_BODY_BYTES = 64  # some clients send {} where no body is needed


def _table() -> dict[tuple[bytes, bytes], Route]:
    score, rerank = Route("score", Kind.POOL, salted=True), Route("rerank", Kind.POOL, salted=True)
    posts = {
        b"/v1/chat/completions": Route("chat", Kind.GENERATE, done_marker=DONE_MARKER, injects_usage=True, salted=True),
        b"/v1/chat/completions/batch": Route("chat_batch", Kind.GENERATE, salted=True),
        b"/v1/completions": Route(
            "completions", Kind.GENERATE, done_marker=DONE_MARKER, injects_usage=True, salted=True
        ),
        b"/v1/responses": Route("responses", Kind.GENERATE, salted=True),
        b"/v1/messages": Route(
            "messages", Kind.GENERATE, done_marker=b"event: message_stop", anthropic=True, salted=True
        ),
        b"/v1/embeddings": Route("embeddings", Kind.POOL, salted=True),
        b"/v1/score": score,
        b"/score": score,
        b"/v1/rerank": rerank,
        b"/rerank": rerank,
        b"/v2/rerank": rerank,
        b"/v2/embed": Route("embed", Kind.POOL),
        b"/pooling": Route("pooling", Kind.POOL, salted=True),
        b"/classify": Route("classify", Kind.POOL, salted=True),
        b"/generative_scoring": Route("generative_scoring", Kind.POOL, decodes=True, salted=True),
        b"/invocations": Route("invocations", by_body=True),
        b"/v1/messages/count_tokens": Route("count_tokens", anthropic=True),
        b"/tokenize": Route("tokenize"),
        b"/detokenize": Route("detokenize"),
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
        b"/tokenizer_info": Route("tokenizer_info", target=b"/tokenizer_info", bodiless=True),
    }
    table = {(b"POST", path): replace(route, target=path, max_body_bytes=None) for path, route in posts.items()}
    table |= {(b"POST", b"/ping"): ready} | {(b"GET", path): route for path, route in gets.items()}
    table |= {(b"HEAD", path): route for path, route in gets.items() if route.local}
    # HAProxy's checks are OPTIONS by default.
    return table | {(b"OPTIONS", path): route for path, route in gets.items() if route.public}


ROUTES = _table()
PREFLIGHT_ROUTE = Route("preflight", local=True, public=True)  # a browser's preflight of a page's request
# Endpoints of /invocations by a field of the body, in the order in which vLLM tries them.
_INVOKED: dict[str, bytes] = {
    "messages": b"/v1/chat/completions",
    "prompt": b"/v1/completions",
    "input": b"/v1/embeddings",
    "documents": b"/v1/rerank",
    "text_2": b"/v1/score",
}
_MODEL = re.compile(rb"/v1/models/([A-Za-z0-9._:@%/+-]{1,512})")
_ID = b"/{id}"  # in paths
_NO_OFF: Mapping[bytes, str] = MappingProxyType({})
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


class RouteTable:
    """The endpoints of the core and of features. `off`: by the beginnings of paths, why the feature is off."""

    def __init__(
        self, more: Mapping[tuple[bytes, bytes], Route] = MappingProxyType({}), off: Mapping[bytes, str] = _NO_OFF
    ) -> None:
        self._routes = {**ROUTES, **more}
        self._off = off
        self._allowed: dict[bytes, str] = {}
        for method, path in self._routes:
            methods = self._allowed.get(path)
            self._allowed[path] = method.decode() if methods is None else f"{methods}, {method.decode()}"
        beginnings = sorted({path[: path.index(_ID)] for path in self._allowed if _ID in path})
        pattern = b"|".join(map(re.escape, beginnings)) or b"(?!)"
        self._with_id = re.compile(b"(%b)/[A-Za-z0-9_-]{1,128}(?=/|$)" % pattern)

    def logged_path(self, path: bytes) -> bytes:
        """The path for logs: without the client's own parts, which may be secret; empty = unknown path."""
        if path in self._allowed or (path := path.partition(b"?")[0]) in self._allowed:
            return path
        return b"/v1/responses/{id}" if _RESPONSE.fullmatch(path) else b""

    def find(self, method: bytes, path: bytes) -> Route:
        """The route of a request. Only query parameters of stored responses are kept.

        Raises RouteNotFound, MethodNotAllowed or InvalidRequest.
        """
        if route := self._routes.get((method, path)):
            return route
        path, _, query = path.partition(b"?")
        pattern = self._with_id.sub(rb"\1/{id}", path)
        if route := self._routes.get((method, pattern)):
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
        raise self._missing(method.decode("ascii", "replace"), path, pattern)

    def _missing(self, method: str, path: bytes, pattern: bytes) -> RouteNotFound | MethodNotAllowed:
        shown = path[:200].decode("ascii", "replace") if path.startswith(b"/") else "(not a path)"
        if (allow := self._allowed.get(pattern)) is not None:
            return MethodNotAllowed(f"Method {method} is not allowed for {shown}; use {allow}.", allow=allow)
        for beginning, why in self._off.items():
            if path.startswith(beginning):
                return RouteNotFound(f"{method} {shown}: {why}")
        return RouteNotFound(f"Unknown request URL: {method} {shown}.")


CORE_ROUTES = RouteTable()


def find_route(method: bytes, path: bytes) -> Route:
    """An endpoint of the core, as `RouteTable.find`."""
    return CORE_ROUTES.find(method, path)


def _passed(query: bytes) -> dict[bytes, bytes]:
    """The parts of a query string that are passed on: the last value of each parameter, and all values of `include`."""
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
