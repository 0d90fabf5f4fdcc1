"""The exact table of methods and paths. Everything else is rejected, in any spelling."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway.errors import InvalidRequest, MethodNotAllowed, RouteNotFound
from gateway.request import Kind


class Local(StrEnum):
    """What the gateway answers itself."""

    MODELS = "models"
    MODEL = "model"
    LIVE = "livez"
    READY = "readyz"


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. `target` is sent to the backend as it is here; `done_marker` ends a complete event stream."""

    endpoint: str
    kind: Kind = Kind.LIGHT
    target: bytes = b""
    done_marker: bytes | None = None
    local: Local | None = None
    anthropic: bool = False
    public: bool = False  # no API key needed
    injects_usage: bool = False
    stored: bool = False  # for a response that one backend stores
    max_body_bytes: int | None = 0  # None = as configured
    streams: bool = False  # the stored response is requested as a stream


_DONE = b"data: [DONE]"
_EMPTY_BODY_BYTES = 64  # some clients send {} where no body is needed


def _table() -> dict[tuple[bytes, bytes], Route]:
    generate = {
        b"/v1/chat/completions": Route("chat", Kind.GENERATE, done_marker=_DONE, injects_usage=True),
        b"/v1/completions": Route("completions", Kind.GENERATE, done_marker=_DONE, injects_usage=True),
        b"/v1/responses": Route("responses", Kind.GENERATE),
        b"/v1/messages": Route("messages", Kind.GENERATE, done_marker=b"event: message_stop", anthropic=True),
    }
    pool = dict.fromkeys((b"/v1/embeddings",), Route("embeddings", Kind.POOL))
    pool |= dict.fromkeys((b"/v1/score", b"/score"), Route("score", Kind.POOL))
    pool |= dict.fromkeys((b"/v1/rerank", b"/rerank", b"/v2/rerank"), Route("rerank", Kind.POOL))
    pool |= {b"/pooling": Route("pooling", Kind.POOL), b"/classify": Route("classify", Kind.POOL)}
    light = {
        b"/v1/messages/count_tokens": Route("count_tokens", anthropic=True),
        b"/tokenize": Route("tokenize"),
        b"/detokenize": Route("detokenize"),
    }
    upload = {
        b"/v1/audio/transcriptions": Route("transcriptions", Kind.UPLOAD, done_marker=_DONE),
        b"/v1/audio/translations": Route("translations", Kind.UPLOAD, done_marker=_DONE),
    }
    posts = generate | pool | light | upload
    gets = {
        b"/v1/models": Route("models", local=Local.MODELS),
        b"/livez": Route("livez", local=Local.LIVE, public=True),
        b"/readyz": Route("readyz", local=Local.READY, public=True),
        b"/health": Route("readyz", local=Local.READY, public=True),
    }
    table = {(b"POST", path): _with_target(route, path) for path, route in posts.items()}
    return table | {(b"GET", path): route for path, route in gets.items()}


def _with_target(route: Route, target: bytes) -> Route:
    return replace(route, target=target, max_body_bytes=None)


ROUTES = _table()
_PATHS = {path: method for method, path in ROUTES}
_MODEL = re.compile(rb"/v1/models/([A-Za-z0-9._:@%/+-]{1,512})")
_RESPONSE = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")
# The query parameters that reach a backend, and their valid values.
_QUERY = {b"stream": re.compile(rb"true|false"), b"starting_after": re.compile(rb"[0-9]{1,18}")}


def find_route(method: bytes, path: bytes) -> Route:
    """The route of a request. Only query parameters of stored responses are kept.

    Raises RouteNotFound, MethodNotAllowed or InvalidRequest.
    """
    path, _, query = path.partition(b"?")
    route = ROUTES.get((method, path))
    if route is not None:
        return route
    if method == b"GET" and _MODEL.fullmatch(path):
        return Route("model", local=Local.MODEL, target=path)
    if (match := _RESPONSE.fullmatch(path)) and method == (b"POST" if match[2] else b"GET"):
        passed = {} if match[2] else _passed(query)
        target = path + b"?" + b"&".join(b"%b=%b" % each for each in passed.items()) if passed else path
        return Route(
            "responses",
            target=target,
            stored=True,
            max_body_bytes=_EMPTY_BODY_BYTES if match[2] else 0,
            streams=passed.get(b"stream") == b"true",
        )
    shown = path[:200].decode("ascii", "replace") if path.startswith(b"/") else "(not a path)"
    if path in _PATHS:
        allow = _PATHS[path].decode()
        raise MethodNotAllowed(
            f"Method {method.decode('ascii', 'replace')} is not allowed for {shown}; use {allow}.", allow=allow
        )
    raise RouteNotFound(f"Unknown request URL: {method.decode('ascii', 'replace')} {shown}.")


def _passed(query: bytes) -> dict[bytes, bytes]:
    """The parts of a query string that are passed on."""
    passed = {}
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        pattern = _QUERY.get(name)
        if pattern is not None:
            if not pattern.fullmatch(value):
                allowed = pattern.pattern.decode()
                raise InvalidRequest(f"Invalid query parameter {name.decode()}: it must match {allowed}.")
            passed[name] = value
    return passed
