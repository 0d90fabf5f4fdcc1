"""Bytes to a checked request: the few fields that the gateway acts on, and the model of its name.

Further names under which engines serve a model (vLLM's `--served-model-name a b`) stand for the first one, except for
names with settings of their own: so all of them share a queue, learned values, and the record of prompts. Every route
gets its model from `permitted` and `ModelNames`.
"""

import hashlib
import hmac
import re
import sys
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol

from gateway._native import json_object, prefix_keys
from gateway.config import Config
from gateway.core.errors import InvalidRequest, ModelNotAllowed, PreviousResponseNotFound, ResponseNotFound
from gateway.core.front.http_request import ClientKey, HttpRequest, SchedulingHeaders
from gateway.core.front.json_body import (
    CLOSER_LOOK,
    JsonLimits,
    loaded,
    parse_body,
    refuse_fields,
    refuse_remote_media,
    with_fields,
)
from gateway.core.front.routes import Route, invoked_route
from gateway.core.request import BackgroundRun, Demand, InferenceRequest, Kind, ModelChoice
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.routing.estimates import Estimates
from gateway.core.routing.prompt_blocks import (
    OPENING,
    Prompt,
    add_opening,
    inputs_of,
    scored_bytes,
    seed,
    sequences_of,
    text_prompt,
    turns_in_steps,
    turns_of,
)
from gateway.core.turns import Steps, at_once


def permitted(name: str | None, key: ClientKey | None) -> str:
    """The name that a client uses, or the only model's if it uses none. Raises InvalidRequest or ModelNotAllowed."""
    if name is None:
        raise InvalidRequest("You must provide a model. GET /v1/models lists the available models.", param="model")
    if key is not None and key.models is not None and not key.allows(name):
        raise ModelNotAllowed.of(name)
    return name


class ModelNames:
    """Maps clients' names to models. `served`: other names under which engines serve, and the model of each, kept
    current by its owner; `own`: names with settings.

    `listed`: names besides those of the backends, each with its possible models. `fallbacks`: each model's substitutes.
    """

    def __init__(self, served: Mapping[str, str] = MappingProxyType({}), own: Collection[str] = ()) -> None:
        self._served, self._own = served, own
        self.listed: Mapping[str, Sequence[str]] = {}
        self.fallbacks: Mapping[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._served and name not in self._own

    def model_of(self, name: str, tenant: str, session: str, kind: Kind, document: dict[str, Any]) -> str:  # noqa: ARG002
        """The model of a name, for this tenant's conversation; a name that is no alias is the model itself."""
        return self.first(name)

    def continued(self, alias: str, model: str) -> bool:
        """Whether a conversation under this name may go on with this model."""
        return model == self.first(alias)

    def first(self, model: str) -> str:
        return model if model in self._own else self._served.get(model, model)


FALLBACKS: Final = "fallbacks"  # the dispatcher of requests with fallback models
MEDIA_TOKENS: Final = 1000  # the estimate for an image, a sound or a file: the real number depends on the model
_MEDIA_MARK: Final = b";base64,"  # the text up to the next quote is media
_MOST_MEDIA = 1024
_PROMPT_FIELDS: Final = {
    **dict.fromkeys(("chat", "chat_batch", "messages"), "messages"),
    "completions": "prompt",
    "responses": "input",
}
_MAX_SEEDS = 1024
_NUMBERS: Final = frozenset((bool, int, float, type(None)))
_RANK = re.compile(rb"[0-9]{1,4}")
_SAFE_VALUE = re.compile(rb"[\x21-\x7e][\x20-\x7e]{0,1023}")
# The first of the limits counts; `n` and `best_of` are checked only. With the least value.
_COUNTS = (("n", 1), ("best_of", 1), ("max_completion_tokens", 0), ("max_tokens", 0), ("max_output_tokens", 0))
_LOGPROBS = frozenset(("echo", "logprobs", "prompt_logprobs"))
_RARE: Final = CLOSER_LOOK | OPENING | _LOGPROBS | {"cache_salt", "prompt", *(name for name, _ in _COUNTS)}
_PASSED: Final[tuple[bytes, ...]] = (b"traceparent", b"tracestate", b"x-session-id")
_GENERATE: Final = Kind.GENERATE
_POOL: Final = Kind.POOL
_json_object: Final = json_object  # compiled code looks up a global for each request, a Final once
_prefix_keys: Final = prefix_keys


class PromptSamples(Protocol):
    """Keeps some of the prompts, for a report: their canonical text message by message."""

    def wants_sample(self, now: float) -> bool:
        """Whether to call `sample` for this request. Called once for every request that generates."""

    def sample(self, pieces: Sequence[bytes], demand: Demand, client: str, application: str, now: float) -> None: ...


class StoredPlace(Protocol):
    """Where a response is stored. `alias`: the client's name for the model, if it is another."""

    @property
    def backend(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def alias(self) -> str: ...


class ResponseStore(Protocol):
    """Knows which backend stores a response. `owner`: the API key's name and the tenant."""

    def find(self, response_id: str, owner: tuple[str, str]) -> StoredPlace | None:
        """The place of this client's response; None if it is unknown, or another client's."""

    def noting(
        self, model: str, owner: tuple[str, str], run: BackgroundRun | None, alias: str = ""
    ) -> Callable[[str, bytes], None]:
        """The receiver of the backend and the first bytes of a response to this client."""

    def cancelled(self, response_id: str) -> None:
        """The client of this response has cancelled it."""


WorkReader = Callable[[str, dict[str, Any], str], tuple[str, object] | None]
"""Reads a body for a dispatcher that sends it in batches or in pieces: from endpoint, document and model to the
dispatcher's name and its part of the body; None = the request is sent unchanged."""


class Draft:
    """A request while it is read. `turns`: its messages, if they are text. `rare`: fields that most requests lack.
    `is_plain`: it has nothing but messages of text, the name of a model, and numbers."""

    __slots__ = (
        "alias", "body", "changes", "document", "hides_usage", "incoming", "is_plain", "is_sampled", "model", "prompt",
        "rare", "request_id", "route", "salt", "turns",
    )  # fmt: skip

    def __init__(self, incoming: HttpRequest, route: Route, request_id: str, document: dict[str, Any]) -> None:
        self.incoming = incoming
        self.route = route
        self.request_id = request_id
        self.document = document
        self.body: bytes = incoming.body  # with the changes, once they are made
        self.turns: Prompt | None = text_prompt(document.get("messages"))
        self.prompt: Prompt | None = None  # of a long body: it is read in steps
        self.rare: dict[str, Any] = {}
        self.is_plain = self.turns is not None
        for name, value in document.items():
            if name in _RARE:
                self.rare[name] = value
            if type(value) not in _NUMBERS and name != "messages" and (name != "model" or type(value) is not str):
                self.is_plain = False
        self.model = self.salt = self.alias = ""
        self.hides_usage = False
        self.is_sampled = True  # it may be one of the prefix report's samples
        self.changes: dict[str, Any] = {}  # of fields, for the backend


class RequestReader:
    """Reads JSON requests."""

    def __init__(
        self,
        config: Config,
        *,
        estimates: Estimates,
        stored: ResponseStore,
        salt_secret: bytes,
        tokenized: Container[str] = (),
        report: PromptSamples | None = None,
        memory: MemoryBudget | None = None,
        names: ModelNames | None = None,
        weights: Mapping[str, str] = MappingProxyType({}),
        works: Mapping[str, WorkReader] = MappingProxyType({}),
    ) -> None:
        """`weights`: the first name of the same weights, of names of models; `works`: by endpoint."""
        self._weights = weights
        self._works = works
        self.scheduling = SchedulingHeaders(config.admission.tenant_header, config.admission.comment_seconds)
        self._limits = limits = JsonLimits(config.server)
        self._short_bytes, self._max_depth = limits.short_bytes, limits.depth
        self._max_sequences, self._allow_media_urls = config.server.max_sequences, config.server.allow_media_urls
        self.names = names or ModelNames()
        self._fallbacks = self.names.fallbacks
        self._estimates = estimates
        self._stored = stored
        self._salt_secret = salt_secret
        self._tokenized = tokenized  # models whose prompts can be tokenized
        self._report = report
        self._memory = memory or MemoryBudget(sys.maxsize)
        self._seeds: dict[str, int] = {}

    def read(
        self, incoming: HttpRequest, route: Route, request_id: str, only_model: Callable[[], str | None]
    ) -> InferenceRequest:
        """A JSON request. `only_model` returns the model to use where the body names none. Raises InvalidRequest."""
        body = incoming.body
        document = _json_object(body, self._max_depth) if len(body) <= self._short_bytes else None
        if document is None:
            return at_once(self.read_in_steps(incoming, route, request_id, only_model))
        if route.by_body:
            route = invoked_route(document)
        draft = Draft(incoming, route, request_id, document)
        if draft.rare and not CLOSER_LOOK.isdisjoint(draft.rare):
            refuse_fields(document)
        left: list[Any] = [] if self._allow_media_urls or draft.is_plain else [document]
        while left:
            refuse_remote_media(document, left, route.kind is _GENERATE, draft.turns is not None)
        self._check(draft, only_model)
        if draft.changes:
            draft.body = at_once(with_fields(body, document, draft.changes))
        return self._request(draft)

    def read_in_steps(
        self, incoming: HttpRequest, route: Route, request_id: str, only_model: Callable[[], str | None]
    ) -> Steps[InferenceRequest]:
        """The same for a long body. Its parsed values are reserved meanwhile."""
        with Holding(self._memory) as holding:
            document = yield from parse_body(incoming.body, self._limits, holding)
            if route.by_body:
                route = invoked_route(document)
            draft = Draft(incoming, route, request_id, document)
            left: list[Any] = [] if self._allow_media_urls else [document]
            while left:
                yield
                refuse_remote_media(document, left, route.kind is _GENERATE, draft.turns is not None)
            self._check(draft, only_model)
            yield
            if draft.changes:
                draft.body = yield from with_fields(draft.body, document, draft.changes)
                yield
            return (yield from self._request_in_steps(draft))

    def _check(self, draft: Draft, only_model: Callable[[], str | None]) -> None:
        """Find the model, the cache salt, and the fields to change. Raises InvalidRequest."""
        document, key, route, changes = draft.document, draft.incoming.key, draft.route, draft.changes
        model = permitted(_string(document, "model") or only_model(), key)
        if model in self.names:
            draft.alias = model
            changes["model"] = model = self._aliased(draft)
        salt = (_string(document, "cache_salt") or "") if draft.rare else ""
        if key is not None and key.isolate_cache and route.salted:
            message = f"{len(key.name)}:{key.name}:{salt}".encode()
            changes["cache_salt"] = salt = hmac.new(self._salt_secret, message, hashlib.sha256).hexdigest()
        streams = document.get("stream")
        if streams is not None and type(streams) is not bool:
            raise InvalidRequest("The field 'stream' must be true or false.", param="stream")
        if streams and route.injects_usage and (options := _counting(document.get("stream_options"))) is not None:
            changes["stream_options"] = options
            draft.hides_usage = True
        draft.model, draft.salt = model, salt

    def _request_in_steps(self, draft: Draft) -> Steps[InferenceRequest]:
        if draft.route.kind is _GENERATE:
            field = _PROMPT_FIELDS[draft.route.endpoint]
            if draft.turns is None or field != "messages":
                draft.prompt = yield from turns_in_steps(draft.document, field)
                yield
        return self._request(draft)

    def _request(self, draft: Draft) -> InferenceRequest:
        document, incoming, route, model = draft.document, draft.incoming, draft.route, draft.model
        endpoint, kind = route.endpoint, route.kind
        generates, pools = kind is _GENERATE, kind is _POOL
        demand = self._generation(draft) if generates else self._other(draft, pools=pools)
        dispatcher, work = "", None
        if pools and (read := self._works.get(endpoint)) is not None:
            changed = document | draft.changes if draft.changes else document
            dispatcher, work = read(endpoint, changed, model) or ("", None)
        stores = endpoint == "responses"
        run = BackgroundRun() if stores and document.get("background") else None
        choice = None
        if draft.alias or (generates and model in self._fallbacks):
            choice = self._choice(draft, demand)
            if choice is not None and choice.fallbacks:
                dispatcher = FALLBACKS
        keeps_document = generates and (type(document.get("prompt")) is list or model in self._tokenized)
        return InferenceRequest(
            endpoint,
            kind,
            b"POST",
            route.target,
            demand,
            request_id=draft.request_id,
            body=draft.body,
            document=document if keeps_document else None,
            salt=draft.salt,
            dispatcher=dispatcher,
            work=work,
            headers=upstream_headers(incoming, draft.request_id),
            done_marker=route.done_marker,
            hides_usage=draft.hides_usage,
            repeatable=run is None,
            on_opening=self._noting(draft, run) if stores else None,
            explains=incoming.headers.get(b"x-gateway-explain") == b"1",
            background=run,
            model_choice=choice,
        )

    def _aliased(self, draft: Draft) -> str:
        """The model of a request under an alias. Raises PreviousResponseNotFound."""
        document, incoming, alias = draft.document, draft.incoming, draft.alias
        if draft.route.endpoint == "responses" and (previous := _string(document, "previous_response_id")) is not None:
            stored = self._place_of(previous, incoming).model
            if self.names.continued(alias, stored):
                return stored
        return self.model_of(alias, incoming, draft.route.kind, document)

    def model_of(self, name: str, incoming: HttpRequest, kind: Kind, document: dict[str, Any]) -> str:
        """The model that a client's name stands for."""
        named = document.get("prompt_cache_key")
        session = incoming.headers.get(b"x-session-id", b"").decode("latin-1") or (named if type(named) is str else "")
        _, tenant = self.scheduling.owner(incoming)
        return self.names.model_of(name, tenant, session, kind, document)

    def _choice(self, draft: Draft, demand: Demand) -> ModelChoice | None:
        """The origin of the request's model, and its substitutes. Raises InvalidRequest."""
        fallbacks, given = self._fallbacks.get(demand.model, ()), draft.incoming.headers.get(b"x-gateway-fallback")
        if fallbacks and (key := draft.incoming.key) is not None:
            fallbacks = tuple([other for other in fallbacks if key.allows(other)])
        if given is not None and given.strip().lower() != b"none":
            raise InvalidRequest("The header X-Gateway-Fallback must be none.")
        if draft.route.kind is not _GENERATE or demand.pinned is not None or given is not None or not fallbacks:
            return ModelChoice(draft.alias) if draft.alias else None
        return ModelChoice(draft.alias, fallbacks, partial(self._remade, draft.incoming, draft.route, draft.alias))

    def _remade(
        self, incoming: HttpRequest, route: Route, alias: str, request: InferenceRequest, model: str
    ) -> Steps[InferenceRequest]:
        """A request that was read, for another model."""
        document = yield from loaded(request.body)
        draft = Draft(incoming, route, request.request_id, document)
        draft.model, draft.salt, draft.alias = model, request.salt, alias
        draft.hides_usage, draft.is_sampled = request.hides_usage, False
        yield
        draft.body = yield from with_fields(request.body, document, {"model": model})
        yield
        return (yield from self._request_in_steps(draft))

    def read_stored(self, incoming: HttpRequest, route: Route, request_id: str) -> InferenceRequest:
        """A request for a response that one backend stores. Raises ResponseNotFound."""
        response_id = route.target.partition(b"?")[0].split(b"/")[3].decode()
        place = self._place_of(response_id, incoming, ResponseNotFound)
        permitted(place.alias or place.model, incoming.key)
        demand = Demand(place.model, sequences=0, pinned=place.backend, streams=route.streams)
        return InferenceRequest(
            route.endpoint,
            Kind.LIGHT,
            method=incoming.method,
            target=route.target,
            demand=demand,
            request_id=request_id,
            headers=upstream_headers(incoming, request_id),
            on_opening=(lambda *_: self._stored.cancelled(response_id)) if incoming.method == b"POST" else None,
            model_choice=ModelChoice(place.alias) if place.alias else None,
        )

    def read_bodiless(
        self, incoming: HttpRequest, route: Route, request_id: str, only_model: Callable[[], str | None]
    ) -> InferenceRequest:
        """A question without a body to any backend of the only model. Raises InvalidRequest."""
        model = only_model()
        if model is None:
            raise InvalidRequest(f"{route.target.decode()} has no model, and the backends serve several.")
        permitted(model, incoming.key)
        return InferenceRequest(
            route.endpoint,
            Kind.LIGHT,
            method=b"GET",
            target=route.target,
            demand=Demand(model, sequences=0),
            request_id=request_id,
            headers=upstream_headers(incoming, request_id),
        )

    def _place_of(
        self,
        response_id: str,
        incoming: HttpRequest,
        missing: type[PreviousResponseNotFound | ResponseNotFound] = PreviousResponseNotFound,
    ) -> StoredPlace:
        """Where this client's response is stored. Raises an error of class `missing`."""
        place = self._stored.find(response_id, self.scheduling.owner(incoming))
        if place is None:
            raise missing.of(response_id)
        return place

    def _noting(self, draft: Draft, run: BackgroundRun | None) -> Callable[[str, bytes], None]:
        return self._stored.noting(draft.model, self.scheduling.owner(draft.incoming), run, draft.alias)

    def _other(self, draft: Draft, *, pools: bool) -> Demand:
        tenant, weight, batch, deadline_seconds = self.scheduling.read(draft.incoming, streams=False)
        body, sequences, tokens = draft.body, 0, 1
        if pools:
            sequences = inputs_of(draft.document)
            size = scored_bytes(draft.document, len(body), sequences)
            tokens = int(size / self._estimates.bytes_per_token(draft.model)) or 1
            if _MEDIA_MARK in body:
                tokens = self._tokens_with_media(draft, size)
        return Demand(
            draft.model,
            tenant,
            weight,
            batch,
            deadline_seconds,
            prompt_tokens=tokens,
            sequences=sequences,
            divisible=pools and not draft.route.decodes,
            output_tokens=0,
            size_bytes=len(body),
        )

    def _tokens_with_media(self, draft: Draft, size: int) -> int:
        """The same, where images or files in base64 are a part of this size."""
        body, media = draft.body, 0
        at = body.find(_MEDIA_MARK)
        while at >= 0 and media < _MOST_MEDIA:
            end = body.find(b'"', at)
            size -= end - at
            media += 1
            at = body.find(_MEDIA_MARK, end)
        return int(size / self._estimates.bytes_per_token(draft.model)) + MEDIA_TOKENS * media

    def _generation(self, draft: Draft) -> Demand:
        document, incoming, model, salt = draft.document, draft.incoming, draft.model, draft.salt
        endpoint, streams = draft.route.endpoint, document.get("stream") is True
        has_amounts = draft.rare or endpoint == "chat_batch"
        limit, sequences = _amounts_of(endpoint, document, self._max_sequences) if has_amounts else (None, 1)
        field, turns = _PROMPT_FIELDS[endpoint], draft.turns
        prompt = draft.prompt or (turns if turns is not None and field == "messages" else turns_of(document, field))
        if draft.rare:
            add_opening(prompt, draft.rare)
        keys, edges, ends = _prefix_keys(prompt.pieces, self._seed(model, salt))
        size, turn, turn_end = prompt.more_bytes, 0, 0
        for piece in prompt.pieces:
            size += len(piece)
        if 0 < prompt.answer < len(ends):
            turn, turn_end = ends[prompt.answer - 1], ends[prompt.answer]
        known = self._estimates.measure(model, keys, edges, size, turn, turn_end)
        if not known.answer_is_whole:
            turn = turn_end = 0
        if prompt.token_ids is not None:
            prompt_tokens = len(prompt.token_ids) + prompt.more_bytes // 4
        else:
            prompt_tokens = known.prompt_tokens + (MEDIA_TOKENS * prompt.media if not known.anchor_size else 0)
        pinned = None
        if endpoint == "responses" and (previous := _string(document, "previous_response_id")) is not None:
            pinned = self._place_of(previous, incoming).backend
        client = incoming.key.name if incoming.key is not None else ""
        rank = incoming.headers.get(b"x-data-parallel-rank", b"")
        application = named if type(named := document.get("prompt_cache_key")) is str else ""
        session = incoming.headers.get(b"x-session-id", b"").decode("latin-1") or application
        tenant, weight, batch, deadline_seconds = self.scheduling.read(incoming, streams=streams)
        demand = Demand(
            model,
            tenant,
            weight,
            batch,
            deadline_seconds,
            keys,
            edges,
            ends,
            size,
            prompt_tokens,
            turn,
            turn_end,
            known.anchor_size,
            known.anchor_tokens,
            learnable_bytes=0 if prompt.media or prompt.token_ids is not None else size,
            reads_cache=not draft.rare or _reads_cache(draft.rare),
            sequences=sequences,
            output_tokens=limit,
            streams=streams,
            size_bytes=len(draft.body),
            pinned=pinned,
            rank=int(rank) if rank and _RANK.fullmatch(rank) else None,  # like vLLM, ignore other text
            hint=seed(client, session[:1024]) if session else 0,
        )
        report = self._report if draft.is_sampled else None
        if report is not None and prompt.token_ids is None and report.wants_sample(incoming.arrived_seconds):
            report.sample(prompt.pieces, demand, client, application, incoming.arrived_seconds)
        return demand

    def _seed(self, model: str, salt: str) -> int:
        """Where the chain of a prompt's keys starts: engines' caches depend on the weights, not on their name."""
        model = self._weights.get(model, model)
        known = self._seeds.get(model) if not salt else None
        if known is not None:
            return known
        made = seed(model, salt)
        if not salt and len(self._seeds) < _MAX_SEEDS:
            self._seeds[model] = made
        return made


def _reads_cache(rare: dict[str, Any]) -> bool:
    """False where the engine must compute the log-probabilities of every prompt token."""
    return rare.get("prompt_logprobs") is None and not (rare.get("echo") and rare.get("logprobs") is not None)


def upstream_headers(incoming: HttpRequest, request_id: str) -> bytes:
    """Header lines for the backend: request id, trace context, session; no other header of the client."""
    lines = b"x-request-id: %b\r\n%b" % (request_id.encode(), incoming.trace_line)
    headers = incoming.headers
    for name in _PASSED:
        value = headers.get(name)
        if value is not None and _SAFE_VALUE.fullmatch(value):
            lines += b"%b: %b\r\n" % (name, value)
    return lines


def _string(document: dict[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is None:
        return None
    if type(value) is not str:
        raise InvalidRequest(f"The field {name!r} must be a string.", param=name)
    if len(value) > 1024:
        raise InvalidRequest(f"The field {name!r} exceeds the limit of 1024 characters.", param=name)
    return value


def _counting(options: Any) -> dict[str, Any] | None:
    """Stream options that make the engine report usage; None if the client requests it, or they are invalid."""
    if options is None:
        return {"include_usage": True}
    if type(options) is not dict or options.get("include_usage") not in (None, False):
        return None
    return {name: options[name] for name in options if name != "continuous_usage_stats"} | {"include_usage": True}


def _amounts_of(endpoint: str, document: dict[str, Any], max_sequences: int) -> tuple[int | None, int]:
    """The client's limit of output tokens, if any, and the number of sequences. Raises InvalidRequest."""
    limit = None
    for name, at_least in _COUNTS:
        value = document.get(name)
        if value is None:
            continue
        if type(value) is not int or value < at_least:
            raise InvalidRequest(f"The field {name!r} must be a whole number of at least {at_least}.", param=name)
        if not at_least:
            limit = value
            break
    param = "n"
    if endpoint == "chat_batch":
        given, param = document.get("messages"), "messages"
        if type(given) is not list or not given or type(given[0]) is not list:
            raise InvalidRequest("The field 'messages' must be a list of conversations.", param=param)
    sequences = sequences_of(document)
    if sequences > max_sequences:
        raise InvalidRequest(
            f"This request needs {sequences} sequences (n x prompts), which exceeds the limit of {max_sequences} per"
            " request (server.max_sequences).",
            param=param,
        )
    return limit, sequences
