"""One HTTP request to one answer: route, key, body, dispatch; and exactly one recorded outcome."""

import asyncio
import difflib
import re
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Protocol
from urllib.parse import unquote

import orjson
import structlog

from gateway.config import Config
from gateway.core.backends.fleet import Fleet
from gateway.core.errors import BackendError, Draining, GatewayError, InternalError, ModelNotFound, NoBackend
from gateway.core.front.connection import ClientConnection, RequestHandler
from gateway.core.front.http_request import KNOWN_HEADERS, ClientKey, HttpRequest, KeyCheck
from gateway.core.front.json_body import SHORT_BYTES
from gateway.core.front.origin import FORWARDED_FOR, ORIGIN, PREFLIGHT, USER_AGENT, TrustedProxies, WebPages
from gateway.core.front.read import RequestReader
from gateway.core.front.reply import JSON, ClientResponse, CountingResponse, RequestDispatcher, error_headers
from gateway.core.front.routes import CORE_ROUTES, Route, RouteTable
from gateway.core.ledger import Limits, RequestLedger
from gateway.core.observe.record import Record, Trace
from gateway.core.request import InferenceRequest
from gateway.core.turns import in_turns


def answer_local(
    route: Route,
    path: bytes,
    key: ClientKey | None,
    fleet: Fleet,
    aliases: Mapping[str, Sequence[str]],
    draining: bool,
    reply: ClientResponse,
) -> None:
    """Answer through `reply`. Raises ModelNotFound, NoBackend or Draining."""
    document: dict[str, object]
    if route.endpoint == "preflight":
        reply.send(204, JSON, PREFLIGHT, b"")
        return
    if route.endpoint == "livez":
        document = {"status": "alive"}
    elif route.endpoint == "readyz":
        check_ready(fleet, draining)
        document = {"status": "ready"}
    elif route.endpoint == "version":
        versions = sorted({backend.facts.version for backend in fleet.backends if backend.facts.version})
        if not versions:
            raise NoBackend("No backend has reported its version.")
        document = {"version": ", ".join(versions)}
    elif route.endpoint == "load":
        document = {"server_load": sum(backend.in_flight for backend in fleet.backends)}
    elif route.endpoint == "models":
        document = {"object": "list", "data": _cards(fleet, aliases, key)}
    else:
        name = unquote(path.partition(b"?")[0].decode("ascii")).removeprefix("/v1/models/")
        found = [card for card in _cards(fleet, aliases, key) if card["id"] == name]
        if not found:
            raise ModelNotFound.of(name)
        document = found[0]
    reply.send(200, JSON, b"", orjson.dumps(document))


def check_ready(fleet: Fleet, draining: bool) -> None:
    """Raises NoBackend or Draining if requests should go to another gateway."""
    if draining:
        raise Draining("The gateway is shutting down.")
    if not fleet.ready:
        raise NoBackend("No backend is available.")


def _cards(fleet: Fleet, aliases: Mapping[str, Sequence[str]], key: ClientKey | None) -> list[dict[str, object]]:
    """The model cards of the backends, unchanged, and one for each alias of a served model, if the key may use them.

    An alias of several models has the card of the first one that is served.
    """
    cards = {
        card.id: {"object": "model", "owned_by": "vllm"} | dict(card.raw) | {"id": card.id} for card in fleet.models()
    }
    listed = [*cards.values()]
    for alias, models in aliases.items():
        card = next((cards[model] for model in models if model in cards), None)
        if card is not None and alias not in cards:
            listed.append(card | {"id": alias})
    return listed if key is None or key.models is None else [card for card in listed if key.allows(str(card["id"]))]


_MOST_NAMES = 10  # in one message
_MOST_COMPARED = 64  # names, and as many times two characters of each: a refusal stays cheap


def explain(
    error: GatewayError, fleet: Fleet, aliases: Mapping[str, Sequence[str]], key: ClientKey | None = None
) -> None:
    """Add facts unknown to the raising part: the existing models, or the reasons why no backend is ready."""
    if isinstance(error, ModelNotFound) and error.model:
        names = [str(card["id"]) for card in _cards(fleet, aliases, key)]
        error.reword(_unknown_model(error.model, names, fleet.why_none(error.model)))
    elif isinstance(error, NoBackend) and error.model and (reasons := fleet.why_none(error.model)):
        error.reword(f"{error.message} {reasons}.")


def _unknown_model(model: str, names: list[str], unlisted: str) -> str:
    """The message; `unlisted`: backends with unknown models, with the reasons."""
    message = f"The model {model[: 2 * _MOST_COMPARED]!r} does not exist."
    compared = {name[: 2 * _MOST_COMPARED].lower(): name for name in names[:_MOST_COMPARED] if name != model}
    if near := difflib.get_close_matches(model[: 2 * _MOST_COMPARED].lower(), compared, n=1):
        message += f" Did you mean {compared[near[0]]!r}?"
    if names:
        more = f" and {len(names) - _MOST_NAMES} more (GET /v1/models)" if len(names) > _MOST_NAMES else ""
        message += f" Available models: {', '.join(names[:_MOST_NAMES])}{more}."
    return f"{message} The models of other backends are not known yet: {unlisted}." if unlisted else message


class RequestSource(Protocol):
    """Reads the requests of routes with its name, without a JSON body: uploads, and sessions."""

    async def read(
        self,
        incoming: HttpRequest,
        route: Route,
        connection: ClientConnection,
        reply: ClientResponse,
        reader: RequestReader,
    ) -> InferenceRequest:
        """The request, once its model is known. Raises a GatewayError."""


class LocalApi(Protocol):
    """Answers requests of routes with its name, which go to no backend."""

    async def answer(self, incoming: HttpRequest, owner: tuple[str, str], reply: ClientResponse) -> None:
        """Answer through `reply`. `owner`: the API key's name and the tenant. Raises a GatewayError."""


class TraceSource(ABC):
    """Decides which requests are traced."""

    @abstractmethod
    def begin(self, headers: dict[bytes, bytes], method: bytes, path: bytes) -> tuple[bytes, Trace | None]:
        """The header line by which backends see the trace of a request, and the trace, if the request is traced."""


_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_NO_BODY = Route("unknown")
_LATEST = 1.5  # retry-after is between the estimate and this multiple of it


class Handler(RequestHandler):
    """Answers requests, each with one recorded outcome."""

    def __init__(
        self,
        config: Config,
        *,
        fleet: Fleet,
        dispatchers: Mapping[str, RequestDispatcher],
        reader: RequestReader,
        ledger: RequestLedger,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        complete: Callable[[InferenceRequest], Awaitable[InferenceRequest]],
        random: Random,
        traces: TraceSource | None = None,
        sources: Mapping[str, RequestSource] = MappingProxyType({}),
        apis: Mapping[str, LocalApi] = MappingProxyType({}),
        routes: RouteTable = CORE_ROUTES,
    ) -> None:
        """`dispatchers`, `sources`, `apis`: by their names in requests and routes; "" is the plain dispatcher."""
        self._fleet = fleet
        self._dispatchers = dispatchers
        self._sources = sources
        self._apis = apis
        self.routes = routes
        self._ledger = ledger
        self._clock = clock
        self._new_id = new_id
        self._complete = complete
        self._random = random
        self._log = structlog.get_logger("gateway")
        self._draining = False
        self.check_key: KeyCheck | None = None
        self.apply(config, reader, traces)

    def apply(self, config: Config, reader: RequestReader, traces: TraceSource | None = None) -> None:
        """Take over headers, the reader and the traces of a configuration."""
        self._reader, self._traces = reader, traces
        tenant, server = config.admission.tenant_header, config.server
        self._proxies = TrustedProxies(server.trusted_proxies) if server.trusted_proxies else None
        self._pages = WebPages(server.cors_origins) if server.cors_origins else None
        more = {tenant.lower().encode()} if tenant else set()
        more |= ({FORWARDED_FOR} if self._proxies else set()) | ({ORIGIN} if self._pages else set())
        logged = frozenset(server.access_log_fields if server.access_log else ())
        self._logs_origin = not logged.isdisjoint(("address", "user_agent", "trace_id"))
        self._counts_bytes = "response_bytes" in logged
        self._reply_class = CountingResponse if self._counts_bytes else ClientResponse
        self._has_extras = any((self._proxies, self._pages, traces, self._logs_origin))
        more |= {USER_AGENT} if "user_agent" in logged else set()
        self.known_headers = KNOWN_HEADERS | more

    def apply_routes(self, routes: RouteTable) -> None:
        """Take over the endpoints of more features."""
        self.routes = routes

    def apply_keys(self, check: KeyCheck | None) -> None:
        """Take over other API keys. None = no request needs one."""
        self.check_key = check

    def start_draining(self) -> None:
        """Be not ready from now on, and close connections after their answers."""
        self._draining = True

    def check_ready(self) -> None:
        """Raises NoBackend or Draining if requests should go to another gateway."""
        check_ready(self._fleet, self._draining)

    async def serve(self, incoming: HttpRequest, connection: ClientConnection) -> None:
        """Answer one request through the connection, even after an error."""
        given = incoming.headers.get(b"x-request-id")
        request_id = given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else self._new_id()
        route, key = incoming.route or _NO_BODY, incoming.key
        reply = self._reply_class(connection, request_id, incoming, incoming.keep_alive and not self._draining)
        connection.attach(reply)
        client = key.name if key is not None else ""
        record = Record(request_id, route.endpoint, incoming.arrived_seconds, len(incoming.body), client)
        if self._has_extras:
            self._add_extras(incoming, route, reply, record)
        outcome = message = ""
        try:
            limits = self._ledger.limits.get(client) if key is not None else None
            if limits is not None:
                reply.set_headers(limits.headers())
            if incoming.error is not None:
                raise incoming.error.again()
            outcome = await self._answer(incoming, connection, route, limits, reply, record)
        except asyncio.CancelledError:
            outcome = "cut_by_shutdown" if connection.was_cut else "client_gone"
            raise
        except GatewayError as error:
            explain(error, self._fleet, self._reader.names.listed, key)
            outcome, message = error.outcome, error.message
            if error.status < 500 and not incoming.path.startswith(self.routes.logged_path(incoming.path) or b" "):
                message = error.code or error.type  # its message may quote the path
            self._fail(error, reply)
        except Exception as error:
            self._log.exception("internal_error", request_id=request_id, endpoint=route.endpoint)
            failure = InternalError(f"Internal error of the gateway ({type(error).__name__}).")
            outcome, message = failure.outcome, failure.message
            self._fail(failure, reply)
        finally:
            record.ended(outcome, reply.status, self._clock(), message)
            if self._counts_bytes:
                record.sent(reply.sent_bytes)
            if not route.public:
                self._ledger.finished(record)

    def _add_extras(self, incoming: HttpRequest, route: Route, reply: ClientResponse, record: Record) -> None:
        """Functions off by default: headers for web pages, clients behind proxies, traces, fields of the access log."""
        headers = incoming.headers
        if self._pages is not None:
            reply.set_constant_headers(self._pages.headers(headers))
        if self._proxies is not None:
            reply.came_through(self._proxies, headers.get(FORWARDED_FOR, b""))
        if self._traces is not None and not route.local:
            line, trace = self._traces.begin(headers, incoming.method, self.routes.logged_path(incoming.path))
            incoming.follow_trace(line)
            if trace is not None:
                record.traced(trace)
        if self._logs_origin:
            trace_line = incoming.trace_line or headers.get(b"traceparent", b"")  # the tracer takes the header out
            record.came_from(reply.address, headers.get(USER_AGENT, b""), trace_line)

    async def _answer(
        self,
        incoming: HttpRequest,
        connection: ClientConnection,
        route: Route,
        limits: Limits | None,
        reply: ClientResponse,
        record: Record,
    ) -> str:
        if route.local:
            if route.answered_by:
                owner = self._reader.scheduling.owner(incoming)
                await self._apis[route.answered_by].answer(incoming, owner, reply)
            else:
                names, key = self._reader.names.listed, incoming.key
                answer_local(
                    route, incoming.path, key, fleet=self._fleet, aliases=names, draining=self._draining, reply=reply
                )
            return "completed"
        if route.source:
            request = await self._sources[route.source].read(incoming, route, connection, reply, self._reader)
        elif route.bodiless:
            request = self._reader.read_bodiless(incoming, route, reply.request_id, self._fleet.only_model)
        elif route.stored:
            request = self._reader.read_stored(incoming, route, reply.request_id)
        elif len(incoming.body) <= SHORT_BYTES:
            request = self._reader.read(incoming, route, reply.request_id, self._fleet.only_model)
        else:
            steps = self._reader.read_in_steps(incoming, route, reply.request_id, self._fleet.only_model)
            request = await in_turns(steps)
        incoming.drop_body()
        if request.document is not None:
            request = await self._complete(request)
        demand = request.demand
        record.parsed(demand, demand.model if self._fleet.serving(demand.model) is not None else "unknown")
        if request.model_choice is not None:
            record.renamed(request.model_choice.alias, "")
        if limits is not None:
            self._ledger.open(request, record, limits)
            reply.set_headers(limits.headers())
        answer = await self._dispatchers[request.dispatcher].dispatch(request, reply, record)
        return "completed" if answer.status < 400 else "refused_by_backend"

    def _fail(self, error: GatewayError, reply: ClientResponse) -> None:
        if isinstance(error, NoBackend):
            error.retry_after(self._fleet.recovery_seconds())
        if error.in_bursts and error.retry_after_seconds is not None:
            error.retry_after(error.retry_after_seconds * self._random.uniform(1.0, _LATEST))
        answer = error.answer if isinstance(error, BackendError) else None
        if answer is not None and not reply.begun:
            when = b"" if b"retry-after" in answer.extra else error_headers(error)
            reply.send(answer.status, answer.content_type, answer.extra + when, answer.body)
        else:
            reply.fail(error)


_BYTES = 12
_AT_ONCE = 256


def request_ids() -> Callable[[], str]:
    """Makes random, unpredictable ids, in any thread. Many are made of one call to the kernel, because each call costs.

    Each operation on the deque is atomic: an id is given once, even with concurrent threads.
    """
    ids = deque[str]()

    def next_id() -> str:
        while True:
            try:
                return ids.popleft()
            except IndexError:
                block = secrets.token_hex(_BYTES * _AT_ONCE)
                ids.extend(block[start : start + 2 * _BYTES] for start in range(0, len(block), 2 * _BYTES))

    return next_id
