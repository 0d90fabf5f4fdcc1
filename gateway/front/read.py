"""Bytes to a checked request: the few fields that the gateway acts on, its tenant and class."""

import hashlib
import hmac
import math
import re
from collections.abc import Callable, Container, Sequence
from typing import Any, Final, Protocol

from gateway._native import json_object, prefix_keys
from gateway.config import Config
from gateway.config.keys import KeyConfig
from gateway.embeddings.wire import inputs_of as embedding_inputs_of
from gateway.embeddings.wire import pairs_of, scored_bytes
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.front.http_request import HttpRequest
from gateway.front.json_body import (
    CLOSER_LOOK,
    Steps,
    at_once,
    parse_body,
    refuse_fields,
    refuse_remote_media,
    short_bytes,
    with_fields,
)
from gateway.front.routes import Route, invoked_route
from gateway.front.stored_responses import Place, StoredResponses
from gateway.request import Demand, InferenceRequest, Kind
from gateway.routing.estimates import Estimates
from gateway.routing.prompt_blocks import (
    OPENING,
    Prompt,
    add_opening,
    inputs_of,
    seed,
    sequences_of,
    text_prompt,
    turns_of,
)

_SANE_NAME = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
_POSITIVE = re.compile(rb"(?=[0-9.]*[1-9])[0-9]{1,12}(?:\.[0-9]{1,9})?")
# The timeout of the client in seconds, as sent by the SDKs of OpenAI and Anthropic for Python and for Node.
_SDK_TIMEOUTS: Final[tuple[bytes, ...]] = (b"x-stainless-read-timeout", b"x-stainless-timeout")


class SchedulingHeaders:
    """Reads a request's tenant, weight, class and deadline from its headers and API key.

    `tenant_header`: empty = none. `comment_seconds`: the interval of keep-alive comments to queued streams; 0 = none.
    """

    def __init__(self, tenant_header: str = "", comment_seconds: float = 0.0) -> None:
        self._tenant_header = tenant_header.lower().encode()
        self._comment_seconds = comment_seconds

    def owner(self, incoming: HttpRequest) -> tuple[str, str]:
        """The API key's name and the tenant: what a client stores belongs to both."""
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

    def _tenant(self, headers: dict[bytes, bytes], key: KeyConfig | None) -> str:
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


MEDIA_TOKENS: Final = 1000  # the estimate for an image, a sound or a file: the real number depends on the model
_MEDIA_MARK: Final = b";base64,"  # what follows, up to a quote, is media
_MOST_MEDIA = 1024
_UPLOAD_BYTES_A_TOKEN = 64  # Whisper makes 50 tokens of a second of speech, for which 3 KB are a low bit rate
_PROMPT_FIELDS: Final = {
    **dict.fromkeys(("chat", "chat_batch", "messages"), "messages"),
    "completions": "prompt",
    "responses": "input",
}
_MAX_SEEDS = 1024
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


class Draft:
    """A request while it is read. `turns`: its messages, if they are text. `rare`: fields that most requests lack."""

    __slots__ = ("body", "changes", "document", "incoming", "model", "rare", "request_id", "route", "salt", "turns")

    def __init__(self, incoming: HttpRequest, route: Route, request_id: str, document: dict[str, Any]) -> None:
        self.incoming = incoming
        self.route = route
        self.request_id = request_id
        self.document = document
        self.body: bytes = incoming.body  # with the changes, once they are made
        self.turns: Prompt | None = text_prompt(document.get("messages"))
        self.rare: dict[str, Any] = {}
        for name in document:
            if name in _RARE:
                self.rare[name] = document[name]
        self.model = self.salt = ""
        self.changes: dict[str, Any] = {}  # of fields, for the backend


class RequestReader:
    """Reads JSON requests."""

    def __init__(
        self,
        config: Config,
        estimates: Estimates,
        stored: StoredResponses,
        salt_secret: bytes,
        tokenized: Container[str] = (),
        report: PromptSamples | None = None,
    ) -> None:
        self.scheduling = SchedulingHeaders(config.admission.tenant_header, config.admission.comment_seconds)
        self._limits = limits = config.server
        self._short_bytes, self._max_depth = short_bytes(limits), limits.max_json_depth
        self._max_sequences, self._allow_media_urls = limits.max_sequences, limits.allow_media_urls
        self._coalesces = config.embeddings.coalesce  # of models without an own setting
        self._coalesces_of = {name: config.embeds("coalesce", name) for name in config.models.by_name}
        self._aliases = config.models.aliases
        self._estimates = estimates
        self._stored = stored
        self._salt_secret = salt_secret
        self._tokenized = tokenized  # models whose prompts can be tokenized
        self._report = report
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
        self._check(draft, only_model)
        if draft.changes:
            draft.body = at_once(with_fields(body, document, draft.changes))
        return self._request(draft)

    def read_in_steps(
        self, incoming: HttpRequest, route: Route, request_id: str, only_model: Callable[[], str | None]
    ) -> Steps[InferenceRequest]:
        """The same for a long body."""
        document = yield from parse_body(incoming.body, self._limits)
        if route.by_body:
            route = invoked_route(document)
        draft = Draft(incoming, route, request_id, document)
        self._check(draft, only_model)
        yield
        if draft.changes:
            draft.body = yield from with_fields(draft.body, document, draft.changes)
        yield
        return self._request(draft)

    def _check(self, draft: Draft, only_model: Callable[[], str | None]) -> None:
        """Find the model, the cache salt, and the fields to change. Raises InvalidRequest."""
        document, key, route, changes = draft.document, draft.incoming.key, draft.route, draft.changes
        generates = route.kind is _GENERATE
        if not self._allow_media_urls:
            refuse_remote_media(document, generates=generates, has_text_turns=draft.turns is not None)
        model = _string(document, "model") or only_model()
        if model is None:
            raise InvalidRequest("You must provide a model. GET /v1/models lists the available models.", param="model")
        if alias := self._aliases.get(model):
            changes["model"] = model = alias
        salt = (_string(document, "cache_salt") or "") if draft.rare else ""
        if key is not None and key.isolate_cache and generates:
            message = f"{len(key.name)}:{key.name}:{salt}".encode()
            changes["cache_salt"] = salt = hmac.new(self._salt_secret, message, hashlib.sha256).hexdigest()
        streams = document.get("stream")
        if streams is not None and type(streams) is not bool:
            raise InvalidRequest("The field 'stream' must be true or false.", param="stream")
        if streams and route.injects_usage and (options := _counting(document.get("stream_options"))) is not None:
            changes["stream_options"] = options
        draft.model, draft.salt = model, salt

    def _request(self, draft: Draft) -> InferenceRequest:
        document, incoming, route, model = draft.document, draft.incoming, draft.route, draft.model
        key, endpoint, kind = incoming.key, route.endpoint, route.kind
        generates, pools = kind is _GENERATE, kind is _POOL
        demand = self._generation(draft) if generates else self._other(draft, pools=pools)
        inputs = pairs = None
        if pools and self._coalesces_of.get(model, self._coalesces):
            if endpoint == "embeddings":
                inputs = embedding_inputs_of(document, model, key.name if key is not None and key.isolate_cache else "")
            elif endpoint in ("rerank", "score"):
                pairs = pairs_of(endpoint, document, model)
        keeps_document = generates and (type(document.get("prompt")) is list or model in self._tokenized)
        return InferenceRequest(
            endpoint,
            kind,
            b"POST",
            route.target,
            demand,
            draft.request_id,
            draft.body,
            document=document if keeps_document else None,
            salt=draft.salt,
            inputs=inputs,
            pairs=pairs,
            headers=upstream_headers(incoming, draft.request_id),
            done_marker=route.done_marker,
            hides_usage="stream_options" in draft.changes,
            repeatable=endpoint != "responses" or not (document.get("store", True) or document.get("background")),
            on_opening=self._remembers(incoming, model) if endpoint == "responses" else None,
            explains=incoming.headers.get(b"x-gateway-explain") == b"1",
        )

    def read_stored(self, incoming: HttpRequest, route: Route, request_id: str) -> InferenceRequest:
        """A request for a response that one backend stores. Raises ModelNotFound."""
        response_id = route.target.partition(b"?")[0].split(b"/")[3].decode()
        place = self._place_of(response_id, incoming, "response_id")
        demand = Demand(place.model, sequences=0, pinned=place.backend, streams=route.streams)
        headers = upstream_headers(incoming, request_id)
        return InferenceRequest(
            route.endpoint, Kind.LIGHT, incoming.method, route.target, demand, request_id, headers=headers
        )

    def read_bodiless(
        self, incoming: HttpRequest, route: Route, request_id: str, only_model: Callable[[], str | None]
    ) -> InferenceRequest:
        """A question without a body to any backend of the only model. Raises InvalidRequest."""
        model = only_model()
        if model is None:
            raise InvalidRequest(f"{route.target.decode()} has no model, and the backends serve several.")
        headers = upstream_headers(incoming, request_id)
        return InferenceRequest(
            route.endpoint, Kind.LIGHT, b"GET", route.target, Demand(model, sequences=0), request_id, headers=headers
        )

    def _place_of(self, response_id: str, incoming: HttpRequest, param: str) -> Place:
        """Where this client's response is stored. Raises ModelNotFound."""
        place = self._stored.find(response_id, self.scheduling.owner(incoming))
        if place is None:
            raise ModelNotFound(f"Unknown response {response_id!r}.", param=param)
        return place

    def _remembers(self, incoming: HttpRequest, model: str) -> Callable[[str, bytes], None]:
        owner = self.scheduling.owner(incoming)
        return lambda backend, opening: self._stored.remember(opening, Place(backend, model, owner))

    def expected_tokens(self, request: InferenceRequest) -> int:
        """What a request is expected to need: its prompt and its answers."""
        demand = request.demand
        if request.kind is Kind.UPLOAD:
            return upload_tokens(request.worked_bytes)
        output_tokens = self._estimates.expected_output_tokens(demand.model, demand.output_tokens)
        return demand.prompt_tokens + round(demand.sequences * output_tokens)

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
            divisible=pools,
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
        limit, sequences = _counts(draft.rare, self._max_sequences) if draft.rare else (None, 1)
        endpoint, streams = draft.route.endpoint, document.get("stream") is True
        sequences = self._conversations(document) if endpoint == "chat_batch" else sequences
        field, turns = _PROMPT_FIELDS[endpoint], draft.turns
        prompt = turns_of(document, field) if turns is None or field != "messages" else turns
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
            pinned = self._place_of(previous, incoming, "previous_response_id").backend
        client = incoming.key.name if incoming.key is not None else ""
        rank = incoming.headers.get(b"x-data-parallel-rank", b"")
        named = document.get("prompt_cache_key")
        application = named if type(named) is str else ""
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
        report = self._report
        if report is not None and prompt.token_ids is None and report.wants_sample(incoming.arrived_seconds):
            report.sample(prompt.pieces, demand, client, application, incoming.arrived_seconds)
        return demand

    def _conversations(self, document: dict[str, Any]) -> int:
        """How many conversations a batch has: a sequence each. Raises InvalidRequest."""
        found = document.get("messages")
        if type(found) is not list or not found or type(found[0]) is not list:
            raise InvalidRequest("The field 'messages' must be a list of conversations.", param="messages")
        if len(found) > self._max_sequences:
            raise _too_many(len(found), "messages", self._max_sequences)
        return len(found)

    def _seed(self, model: str, salt: str) -> int:
        """Where the chain of a prompt's keys starts."""
        known = self._seeds.get(model) if not salt else None
        if known is not None:
            return known
        made = seed(model, salt)
        if not salt and len(self._seeds) < _MAX_SEEDS:
            self._seeds[model] = made
        return made


def upload_tokens(size_bytes: int) -> int:
    """The expected tokens of an upload of this size."""
    return max(1, size_bytes // _UPLOAD_BYTES_A_TOKEN)


def _reads_cache(rare: dict[str, Any]) -> bool:
    """False where the engine must compute the log-probabilities of every prompt token."""
    return rare.get("prompt_logprobs") is None and not (rare.get("echo") and rare.get("logprobs") is not None)


def upstream_headers(incoming: HttpRequest, request_id: str) -> bytes:
    """Header lines for the backend: request id, trace context, session; no other header of the client."""
    lines = b"x-request-id: %b\r\n" % request_id.encode()
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
    """Stream options by which the engine reports usage; None if the client requests it, or they are invalid."""
    if options is None:
        return {"include_usage": True}
    if type(options) is not dict or options.get("include_usage") not in (None, False):
        return None
    return {name: options[name] for name in options if name != "continuous_usage_stats"} | {"include_usage": True}


def _counts(rare: dict[str, Any], max_sequences: int) -> tuple[int | None, int]:
    """The client's limit of output tokens, if any, and the number of sequences. Raises InvalidRequest."""
    limit = None
    for name, at_least in _COUNTS:
        value = rare.get(name)
        if value is None:
            continue
        if type(value) is not int or value < at_least:
            raise InvalidRequest(f"The field {name!r} must be a whole number of at least {at_least}.", param=name)
        if not at_least:
            limit = value
            break
    sequences = sequences_of(rare)
    if sequences > max_sequences:
        raise _too_many(sequences, "n", max_sequences)
    return limit, sequences


def _too_many(sequences: int, param: str, most: int) -> InvalidRequest:
    return InvalidRequest(
        f"This request needs {sequences} sequences (n x prompts), which exceeds the limit of {most} per"
        " request (server.max_sequences).",
        param=param,
    )
