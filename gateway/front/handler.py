"""One HTTP request to one answer: route, key, body, dispatch; and exactly one recorded outcome."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from random import Random
from urllib.parse import unquote

import orjson
import structlog

from gateway.backends.fleet import Fleet
from gateway.config import Config, KeyConfig
from gateway.dispatch import Dispatcher
from gateway.embeddings.coalescer import Coalescer
from gateway.embeddings.rerank import Spreader
from gateway.errors import (
    BackendError,
    Draining,
    GatewayError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NoBackend,
    UnsupportedEncoding,
)
from gateway.front.connection import ClientConnection
from gateway.front.http_request import KNOWN_HEADERS, Incoming, too_large
from gateway.front.json_body import SHORT_BYTES, at_once, in_turns
from gateway.front.rate_limits import Allowance, KeyLimits, Keys
from gateway.front.read import Place, RequestReader, StoredResponses, upstream_headers
from gateway.front.reply import JSON, Reply, error_headers
from gateway.front.routes import Local, Route, find_route
from gateway.front.uploads import Uploads, model_of
from gateway.observe.record import Record
from gateway.relay.upstream import UpstreamResult
from gateway.request import Ask, InferenceRequest, Kind

_MODEL_PATH = "/v1/models/"


def answer_local(
    route: Route, path: bytes, fleet: Fleet, aliases: Mapping[str, str], draining: bool, reply: Reply
) -> None:
    """Answer through `reply`. Raises ModelNotFound, NoBackend or Draining."""
    if route.local is Local.LIVE:
        reply.send(200, JSON, b"", b'{"status":"alive"}')
    elif route.local is Local.READY:
        if draining:
            raise Draining("The gateway is shutting down.")
        if not fleet.ready:
            raise NoBackend("No backend is available.")
        reply.send(200, JSON, b"", b'{"status":"ready"}')
    elif route.local is Local.MODELS:
        reply.send(200, JSON, b"", orjson.dumps({"object": "list", "data": _cards(fleet, aliases)}))
    else:
        name = unquote(path.partition(b"?")[0].decode("ascii")).removeprefix(_MODEL_PATH)
        found = next((card for card in _cards(fleet, aliases) if card["id"] == name), None)
        if found is None:
            raise ModelNotFound(
                f"The model {name!r} does not exist. GET /v1/models lists the available models.", param="model"
            )
        reply.send(200, JSON, b"", orjson.dumps(found))


def _cards(fleet: Fleet, aliases: Mapping[str, str]) -> list[dict[str, object]]:
    """The backends' model cards as they gave them, and one for each alias of a model that is there."""
    cards = {
        card.id: {"object": "model", "owned_by": "vllm"} | dict(card.raw) | {"id": card.id} for card in fleet.models()
    }
    named = [cards[model] | {"id": alias} for alias, model in aliases.items() if model in cards and alias not in cards]
    return [*cards.values(), *named]


_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_NO_BODY = Route("unknown")
_UNKNOWN_UPLOAD_BYTES = 1048576  # of an upload that does not tell its length
_LATEST = 1.5  # refused clients are told to come back between the time measured and this many times as late


class Handler:
    """Answers requests; the owner of nothing but its collaborators."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        dispatcher: Dispatcher,
        coalescer: Coalescer,
        spreader: Spreader,
        reader: RequestReader,
        stored: StoredResponses,
        finished: Callable[[Record], None],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        complete: Callable[[InferenceRequest], Awaitable[None]],
        random: Random,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._coalescer = coalescer
        self._spreader = spreader
        self._uploads = Uploads(fleet, dispatcher, config.admission.max_wait_seconds, clock)
        self._reader = reader
        self._finished = finished
        self._clock = clock
        self._new_id = new_id
        self._complete = complete
        self._random = random
        self._keys = Keys(config.auth.keys)
        allowances = {key.name: _allowance(key) for key in config.auth.keys}
        self._rate_limits = {name: KeyLimits(each, clock) for name, each in allowances.items() if each != Allowance()}
        self._stored = stored
        self._log = structlog.get_logger("gateway")
        tenant = config.admission.tenant_header
        self.known_headers = KNOWN_HEADERS | {tenant.lower().encode()} if tenant else KNOWN_HEADERS
        self.draining = False

    def admit(self, incoming: Incoming) -> bool:
        """Judge a head before its body is read. True = the body is streamed. Raises a GatewayError."""
        incoming.route = route = find_route(incoming.method, incoming.path)
        if not route.public:
            incoming.key = self._keys.check(incoming.headers)
        headers = incoming.headers
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding.lower() != b"identity":
            raise UnsupportedEncoding(
                "Compressed request bodies are unsupported: send the body without Content-Encoding."
            )
        streamed, limit_bytes = route.kind is Kind.UPLOAD, route.max_body_bytes
        if limit_bytes is None:
            server = self._config.server
            limit_bytes = server.max_upload_bytes if streamed else server.max_body_bytes
        incoming.max_body_bytes = limit_bytes
        length = headers.get(b"content-length")
        if length is not None and int(length) > limit_bytes:
            raise too_large(limit_bytes)
        return streamed

    async def serve(self, incoming: Incoming, connection: ClientConnection) -> None:
        """Answer one request through the connection, whatever happens."""
        given = incoming.headers.get(b"x-request-id")
        request_id = given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else self._new_id()
        route = incoming.route or _NO_BODY
        reply = Reply(
            connection,
            request_id,
            incoming.keep_alive and not self.draining,
            http10=incoming.http10,
            anthropic=route.anthropic,
            bodiless=incoming.method == b"HEAD",
        )
        connection.reply = reply
        record = Record(request_id, route.endpoint, incoming.arrived_seconds, request_bytes=len(incoming.body))
        record.client = incoming.key.name if incoming.key is not None else ""
        try:
            limits = self._limits_of(incoming.key)
            if limits is not None:
                reply.standing = limits.headers()
            if incoming.error is not None:
                raise incoming.error
            record.outcome = await self._answer(incoming, route, reply, record)
        except asyncio.CancelledError:
            record.outcome = "cut_by_shutdown" if connection.was_cut else "client_gone"
            raise
        except GatewayError as error:
            self._fail(error, reply, record)
        except Exception as error:
            self._log.exception("internal_error", request_id=request_id, endpoint=route.endpoint)
            self._fail(InternalError(f"Internal error of the gateway ({type(error).__name__})."), reply, record)
        finally:
            record.status = reply.status
            record.ended_seconds = self._clock()
            if record.model and not record.backend and record.outcome != "completed":
                record.queue_seconds = record.ended_seconds - record.arrived_seconds  # it waited, in vain
            if not route.public:
                self._finished(record)

    async def _answer(self, incoming: Incoming, route: Route, reply: Reply, record: Record) -> str:
        if route.local is not None:
            answer_local(route, incoming.path, self._fleet, self._config.models.aliases, self.draining, reply)
            return "completed"
        request = await self._read(incoming, route, reply.request_id)
        incoming.body = b""  # the request has it, perhaps in another form
        if request.document is not None:
            await self._complete(request)
        request.explains = incoming.headers.get(b"x-gateway-explain") == b"1"
        ask = request.ask
        if route.endpoint == "responses" and not route.stored:
            owner = self._reader.standing.owner(incoming.headers, incoming.key)
            request.on_opening = lambda opening: self._stored.remember(opening, Place(record.backend, ask.model, owner))
        record.model = ask.model if self._fleet.serving(ask.model) is not None else "unknown"
        record.streams, record.batch = ask.streams, ask.batch
        limits = self._limits_of(incoming.key)
        if limits is None:
            answer = await self._dispatcher_of(request).dispatch(request, reply, record)
        else:
            answer = await self._dispatch_within(limits, incoming, request, reply, record)
        return "completed" if answer.status < 400 else "refused_by_backend"

    def _dispatcher_of(self, request: InferenceRequest) -> Dispatcher | Coalescer | Spreader | Uploads:
        if request.inputs is not None:
            return self._coalescer
        if request.upload is not None:
            return self._uploads
        return self._dispatcher if request.pairs is None else self._spreader

    def _limits_of(self, key: KeyConfig | None) -> KeyLimits | None:
        return self._rate_limits.get(key.name) if key is not None and self._rate_limits else None

    async def _dispatch_within(
        self, limits: KeyLimits, incoming: Incoming, request: InferenceRequest, reply: Reply, record: Record
    ) -> UpstreamResult:
        """The same for a key with limits: what the request takes of them is put right when it has ended."""
        expected, most = self._reader.expected_tokens(request), limits.most_tokens
        if incoming.upload is not None and most is not None:
            expected = min(expected, most)  # too rough a guess to refuse an upload for good
        with limits.charge(expected) as charge:
            reply.standing = limits.headers()
            try:
                answer = await self._dispatcher_of(request).dispatch(request, reply, record)
                if incoming.upload is not None:
                    request.worked_bytes = incoming.upload.came_bytes
                    expected = self._reader.expected_tokens(request)
                charge.used_tokens = _used_tokens(answer, expected)
                return answer
            except asyncio.CancelledError:
                if record.attempts:
                    charge.used_tokens = _tokens_so_far(request.ask, record, expected)
                raise
            except GatewayError:
                if reply.begun:
                    charge.used_tokens = _tokens_so_far(request.ask, record, expected)
                raise
            finally:
                charge.counts = record.attempts > 0 or reply.begun  # an answer may need no backend

    async def _read(self, incoming: Incoming, route: Route, request_id: str) -> InferenceRequest:
        if incoming.upload is not None:
            content_type, upload = _content_type(incoming), incoming.upload
            await upload.collected()
            model = await model_of(upload, self._only_model())  # sent on as it is: aliases do not apply
            ask = Ask(model, size_bytes=upload.held_bytes)
            length = incoming.headers.get(b"content-length")
            self._reader.standing.give(ask, incoming, incoming.key)
            return InferenceRequest(
                endpoint=route.endpoint,
                kind=route.kind,
                method=incoming.method,
                target=route.target,
                ask=ask,
                request_id=request_id,
                upload=upload,
                worked_bytes=_UNKNOWN_UPLOAD_BYTES if length is None else int(length),
                content_type=content_type,
                headers=upstream_headers(incoming, request_id),
                done_marker=route.done_marker,
                repeatable=False,
            )
        if route.stored:
            return self._stored_request(incoming, route, request_id)
        steps = self._reader.read(incoming, route, request_id, incoming.key, self._only_model)
        return at_once(steps) if len(incoming.body) <= SHORT_BYTES else await in_turns(steps)

    def _stored_request(self, incoming: Incoming, route: Route, request_id: str) -> InferenceRequest:
        response_id = route.target.partition(b"?")[0].split(b"/")[3].decode()
        place = self._stored.find(response_id, self._reader.standing.owner(incoming.headers, incoming.key))
        if place is None:
            raise ModelNotFound(f"Unknown response {response_id!r}.", param="response_id")
        return InferenceRequest(
            endpoint=route.endpoint,
            kind=Kind.LIGHT,
            method=incoming.method,
            target=route.target,
            ask=Ask(place.model, sequences=0, pinned=place.backend, streams=route.streams),
            request_id=request_id,
            headers=upstream_headers(incoming, request_id),
        )

    def _only_model(self) -> str | None:
        models = self._fleet.models()
        return models[0].id if len(models) == 1 else None

    def _fail(self, error: GatewayError, reply: Reply, record: Record) -> None:
        record.outcome = error.outcome
        record.error = error.message
        if isinstance(error, NoBackend):
            error.retry_after_seconds = self._fleet.recovery_seconds()
        if error.spreads and error.retry_after_seconds is not None:
            error.retry_after_seconds *= self._random.uniform(1.0, _LATEST)
        answer = error.answer if isinstance(error, BackendError) else None
        if answer is not None and not reply.begun:
            when = b"" if b"retry-after" in answer.extra else error_headers(error)
            reply.send(answer.status, answer.content_type, answer.extra + when, answer.body)
        else:
            reply.fail(error)


def _allowance(key: KeyConfig) -> Allowance:
    return Allowance(key.requests_per_minute, key.tokens_per_minute, key.max_concurrent_requests)


def _used_tokens(answer: UpstreamResult, expected: int) -> int:
    """What an answered request has used: what the engine says, or what was expected, if it says nothing."""
    if answer.usage is not None and (tokens := answer.usage.prompt_tokens + answer.usage.completion_tokens):
        return tokens
    return expected if answer.status < 400 else 0


def _tokens_so_far(ask: Ask, record: Record, expected: int) -> int:
    """What a request has used that was sent and not answered to its end: a stream tells how far it has come."""
    return ask.prompt_tokens + record.streamed_tokens if ask.streams else expected


def _content_type(incoming: Incoming) -> bytes:
    value = incoming.headers.get(b"content-type", b"")
    if not re.fullmatch(rb'multipart/form-data; *boundary="?[A-Za-z0-9\'()+_,./:=? -]{1,128}"?', value):
        raise InvalidRequest("Content-Type must be multipart/form-data with a boundary.")
    return value


_BYTES = 12
_AT_ONCE = 256


def request_ids() -> Iterator[str]:
    """Random names: none tells anything of another. The kernel is asked once for many, because each call costs."""
    while True:
        block = secrets.token_hex(_BYTES * _AT_ONCE)
        for start in range(0, len(block), 2 * _BYTES):
            yield block[start : start + 2 * _BYTES]
