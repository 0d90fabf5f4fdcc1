"""Bytes to a checked request: the few fields that the gateway acts on, its tenant and class, and stored responses."""

import hashlib
import hmac
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gateway.config import Config, KeyConfig
from gateway.embeddings.rerank_wire import pairs_of, scored_bytes
from gateway.embeddings.wire import inputs_of as embedding_inputs_of
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.front.http_request import Incoming
from gateway.front.json_body import SHORT_BYTES, Steps, parse_body, refuse_remote_media, with_fields
from gateway.front.routes import Route
from gateway.request import Ask, InferenceRequest, Kind
from gateway.routing.estimates import Estimates
from gateway.routing.prompt_blocks import Prompt, canonical_prompt, inputs_of, prefix_keys, seed, sequences_of

_SANE_NAME = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]{0,126}[\x21-\x7e])?")
_POSITIVE = re.compile(rb"(?=[0-9.]*[1-9])[0-9]{1,12}(?:\.[0-9]{1,9})?")
_CLASSES = (b"interactive", b"batch")
# How long a client waits for an answer, in seconds, as SDKs tell it: OpenAI's and Anthropic's for Python, for Node.
_SDK_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")


class Standing:
    """Fills in what the waiting line needs to know of a request.

    `tenant_header`: empty = none. `comment_seconds`: streams that wait send something this often; 0 = nothing.
    """

    def __init__(self, tenant_header: str = "", comment_seconds: float = 0.0) -> None:
        self._tenant_header = tenant_header.lower().encode()
        self._comment_seconds = comment_seconds

    def owner(self, headers: Mapping[bytes, bytes], key: KeyConfig | None) -> tuple[str, str]:
        """The API key's name and the tenant: what a client stores belongs to both."""
        return key.name if key is not None else "", self._tenant(headers, key)

    def give(self, ask: Ask, incoming: Incoming, key: KeyConfig | None) -> None:
        """Set tenant, weight, class and deadline. Raises InvalidRequest for a class or deadline that is none."""
        headers = incoming.headers
        if key is not None:
            ask.weight, ask.batch = key.weight, key.priority == "batch"
        ask.tenant = self._tenant(headers, key)
        priority = headers.get(b"x-gateway-priority")
        if priority is not None:
            ask.batch = _is_batch(priority) or ask.batch  # a client lowers itself, and never rises above its key
        patient_after = self._comment_seconds if ask.streams else 0.0
        ask.deadline_seconds = _deadline(headers, incoming.arrived_seconds, patient_after)

    def _tenant(self, headers: Mapping[bytes, bytes], key: KeyConfig | None) -> str:
        told = headers.get(self._tenant_header, b"").strip() if self._tenant_header else b""
        return _name(told) if told else key.name if key is not None else ""


def _name(told: bytes) -> str:
    """A tenant's name as the proxy told it; what is too long or not plain text is told apart by its hash."""
    if _SANE_NAME.fullmatch(told):
        return told.decode()
    return f"sha256-{hashlib.sha256(told).hexdigest()[:16]}"


def _is_batch(priority: bytes) -> bool:
    told = priority.strip().lower()
    if told not in _CLASSES:
        raise InvalidRequest("The header X-Gateway-Priority must be interactive or batch.")
    return told == b"batch"


def _deadline(headers: dict[bytes, bytes], arrived_seconds: float, patient_after_seconds: float) -> float | None:
    """When the answer must have begun, if the client says so.

    An SDK's time-out is for the time in which nothing comes, so that a comment before it is over makes it patient.
    """
    told = headers.get(b"x-gateway-deadline-ms")
    if told is not None:
        if not _POSITIVE.fullmatch(told.strip()):
            raise InvalidRequest("The header X-Gateway-Deadline-Ms must be a positive number of milliseconds.")
        return arrived_seconds + float(told) / 1000
    for name in _SDK_TIMEOUTS:
        told = headers.get(name)
        if told is not None and (seconds := _seconds(told)) is not None:
            return None if 0 < patient_after_seconds < seconds else arrived_seconds + seconds
    return None


def _seconds(told: bytes) -> float | None:
    """A time-out that an SDK tells; what is no positive number says nothing."""
    try:
        seconds = float(told)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_OPENING_BYTES = 512
_MAX_RESPONSES = 65536


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response is stored: the backend's name and its model. `owner` is the API key's name and the tenant."""

    backend: str
    model: str
    owner: tuple[str, str]


class StoredResponses:
    """The most recent responses."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, Place] = OrderedDict()

    def remember(self, opening: bytes, place: Place) -> None:
        """Note the response whose first bytes these are. An id stays with the client that had it first."""
        if match := _ID.search(opening[:_OPENING_BYTES]):
            self._places.setdefault(match[1].decode(), place)
            if len(self._places) > _MAX_RESPONSES:
                self._places.popitem(last=False)

    def find(self, response_id: str, owner: tuple[str, str]) -> Place | None:
        """Where this client's response is; None if it is not known, or another client's."""
        place = self._places.get(response_id)
        return place if place is not None and place.owner == owner else None


MEDIA_TOKENS = 1000  # what an image, a sound or a file is taken for; how many it has is the model's secret
_UPLOAD_BYTES_A_TOKEN = 64  # Whisper makes 50 tokens of a second of speech, for which 3 KB are a low bit rate
_PROMPT_FIELDS = {"chat": "messages", "messages": "messages", "completions": "prompt", "responses": "input"}
_SAFE_VALUE = re.compile(rb"[\x21-\x7e][\x20-\x7e]{0,1023}")
_PASSED = (b"traceparent", b"tracestate", b"x-session-id")


class PromptSamples(Protocol):
    """Keeps some of the prompts, for a report."""

    def wants_sample(self, now: float) -> bool:
        """Whether to call `sample` for this request. Called once for every request that generates."""

    def sample(self, pieces: Sequence[bytes], ask: Ask, client: str, application: str, now: float) -> None:
        """Keep a prompt: its canonical text message by message, and the names of the API key and the application."""


class RequestReader:
    """Reads JSON requests."""

    def __init__(
        self,
        config: Config,
        estimates: Estimates,
        stored: StoredResponses,
        salt_secret: bytes,
        tokens_wanted: Callable[[str], bool] = lambda _: False,
        report: PromptSamples | None = None,
    ) -> None:
        self.standing = Standing(config.admission.tenant_header, config.admission.comment_seconds)
        self._limits = config.server
        self._coalesces = partial(config.embeds, "coalesce")
        self._aliases = config.models.aliases
        self._estimates = estimates
        self._stored = stored
        self._salt_secret = salt_secret
        self._tokens_wanted = tokens_wanted
        self._report = report
        self._seeds: dict[tuple[str, str], int] = {}

    def read(
        self,
        incoming: Incoming,
        route: Route,
        request_id: str,
        key: KeyConfig | None,
        only_model: Callable[[], str | None],
    ) -> Steps[InferenceRequest]:
        """A JSON request. `only_model` gives the model meant where the body names none. Raises InvalidRequest."""
        document = yield from parse_body(incoming.body, self._limits)
        if not self._limits.allow_media_urls:
            refuse_remote_media(document, generates=route.kind is Kind.GENERATE)
        body = incoming.body
        changes: dict[str, Any] = {}
        model = _string(document, "model") or only_model()
        if model is None:
            raise InvalidRequest("You must provide a model. GET /v1/models lists the available models.", param="model")
        if alias := self._aliases.get(model):
            changes["model"] = model = alias
        salt = _string(document, "cache_salt") or ""
        if key is not None and key.isolate_cache and route.kind is Kind.GENERATE:
            changes["cache_salt"] = salt = self._isolated_salt(key, salt)
        streams = _flag(document, "stream")
        options = _counting(document.get("stream_options")) if streams and route.injects_usage else None
        if hides_usage := options is not None:
            changes["stream_options"] = options
        if len(body) > SHORT_BYTES:
            yield
        if changes:
            body = yield from with_fields(body, document, changes)
        if len(body) > SHORT_BYTES:
            yield
        prompt_is_ids = type(document.get("prompt")) is list
        ask = self._ask(document, incoming, route, model, salt, streams, len(body), key)
        self.standing.give(ask, incoming, key)
        inputs = pairs = None
        if route.endpoint == "embeddings" and self._coalesces(model):
            isolation = key.name if key is not None and key.isolate_cache else ""
            inputs = embedding_inputs_of(document, model, isolation)
        elif route.endpoint in ("rerank", "score") and self._coalesces(model):
            pairs = pairs_of(route.endpoint, document, model)
        keeps_document = route.kind is Kind.GENERATE and (prompt_is_ids or self._tokens_wanted(model))
        return InferenceRequest(
            endpoint=route.endpoint,
            kind=route.kind,
            method=b"POST",
            target=route.target,
            document=document if keeps_document else None,
            salt=salt,
            inputs=inputs,
            pairs=pairs,
            ask=ask,
            request_id=request_id,
            body=body,
            worked_bytes=scored_bytes(document, len(body), ask.sequences) if route.kind is Kind.POOL else 0,
            headers=upstream_headers(incoming, request_id),
            done_marker=route.done_marker,
            hides_usage=hides_usage,
            repeatable=not (route.endpoint == "responses" and _is_stored(document)),
        )

    def expected_tokens(self, request: InferenceRequest) -> int:
        """What a request will need: its prompt, and its answers as far as they can be foreseen."""
        ask = request.ask
        if request.kind is Kind.UPLOAD:
            return max(1, request.worked_bytes // _UPLOAD_BYTES_A_TOKEN)
        if request.kind is Kind.POOL:
            return max(1, round(request.worked_bytes / self._estimates.bytes_per_token(ask.model)))
        output_tokens = self._estimates.expected_output_tokens(ask.model, ask.output_tokens)
        return ask.prompt_tokens + round(ask.sequences * output_tokens)

    def _ask(
        self,
        document: dict[str, Any],
        incoming: Incoming,
        route: Route,
        model: str,
        salt: str,
        streams: bool,
        size_bytes: int,
        key: KeyConfig | None,
    ) -> Ask:
        if route.kind is not Kind.GENERATE:
            pools = route.kind is Kind.POOL
            count = inputs_of(document) if pools else 0
            return Ask(model, sequences=count, divisible=pools, output_tokens=0, size_bytes=size_bytes)
        limit = _limit(document)
        sequences = sequences_of(document)
        if sequences > self._limits.max_sequences:
            raise InvalidRequest(
                f"This request needs {sequences} sequences (n x prompts), which exceeds the limit of"
                f" {self._limits.max_sequences} per request (server.max_sequences).",
                param="n",
            )
        prompt = canonical_prompt(document, _PROMPT_FIELDS[route.endpoint])
        ask = self._measured(prompt, model, salt)
        ask.sequences, ask.output_tokens, ask.streams, ask.size_bytes = sequences, limit, streams, size_bytes
        ask.reads_cache = document.get("prompt_logprobs") is None and not (
            document.get("echo") and document.get("logprobs") is not None
        )
        if route.endpoint == "responses":
            ask.pinned = self._stored_on(document, self.standing.owner(incoming.headers, key))
        ask.rank = _rank(incoming.headers.get(b"x-data-parallel-rank"))
        named = document.get("prompt_cache_key")
        application = named if type(named) is str else ""
        session = incoming.headers.get(b"x-session-id", b"").decode("latin-1") or application
        if session:
            ask.hint = seed(key.name if key is not None else "", session[:1024])
        now, report = incoming.arrived_seconds, self._report
        if report is not None and prompt.token_ids is None and report.wants_sample(now):
            report.sample(prompt.pieces, ask, key.name if key is not None else "", application, now)
        return ask

    def _measured(self, prompt: Prompt, model: str, salt: str) -> Ask:
        keys, edges, ends = prefix_keys(prompt.pieces, self._seed(model, salt))
        size, turn, turn_end = sum(map(len, prompt.pieces)) + prompt.more_bytes, 0, 0
        if 0 < prompt.answer < len(ends):
            turn, turn_end = ends[prompt.answer - 1], ends[prompt.answer]
        known = self._estimates.measure(model, keys, edges, size, turn, turn_end)
        tokens = known.prompt_tokens
        if prompt.token_ids is not None:
            tokens = len(prompt.token_ids) + prompt.more_bytes // 4
        elif prompt.media and not known.anchor_size:
            tokens += MEDIA_TOKENS * prompt.media
        return Ask(
            model,
            keys=keys,
            edges=edges,
            ends=ends,
            prompt_size=size,
            prompt_tokens=tokens,
            turn=turn if known.answer_is_whole else 0,
            turn_end=turn_end if known.answer_is_whole else 0,
            anchor_size=known.anchor_size,
            anchor_tokens=known.anchor_tokens,
            learnable_bytes=0 if prompt.media or prompt.token_ids is not None else size,
        )

    def _stored_on(self, document: dict[str, Any], owner: tuple[str, str]) -> str | None:
        """The backend that stores the response which this one continues."""
        previous = _string(document, "previous_response_id")
        if previous is None:
            return None
        place = self._stored.find(previous, owner)
        if place is None:
            raise ModelNotFound(f"Unknown response {previous!r}.", param="previous_response_id")
        return place.backend

    def _seed(self, model: str, salt: str) -> int:
        if salt:
            return seed(model, salt)
        known = self._seeds.get((model, salt))
        if known is None:
            known = seed(model, salt)
            if len(self._seeds) < 1024:
                self._seeds[model, salt] = known
        return known

    def _isolated_salt(self, key: KeyConfig, salt: str) -> str:
        message = f"{len(key.name)}:{key.name}:{salt}".encode()
        return hmac.new(self._salt_secret, message, hashlib.sha256).hexdigest()


def upstream_headers(incoming: Incoming, request_id: str) -> bytes:
    """Header lines that travel on: the request's id, trace context, session. Nothing else of the client's does."""
    lines = b"x-request-id: %b\r\n" % request_id.encode()
    headers = incoming.headers
    for name in _PASSED:
        value = headers.get(name)
        if value is not None and _SAFE_VALUE.fullmatch(value):
            lines += b"%b: %b\r\n" % (name, value)
    return lines


def _rank(value: bytes | None) -> int | None:
    """The engine of a backend that the client asks for; vLLM ignores what is no number, and so does this."""
    return int(value) if value is not None and re.fullmatch(rb"[0-9]{1,4}", value) else None


def _string(document: dict[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is None:
        return None
    if type(value) is not str:
        raise InvalidRequest(f"The field {name!r} must be a string.", param=name)
    if len(value) > 1024:
        raise InvalidRequest(f"The field {name!r} exceeds the limit of 1024 characters.", param=name)
    return value


def _is_stored(document: dict[str, Any]) -> bool:
    """Whether the backend keeps the response, as it does unless told otherwise."""
    return bool(document.get("store", True) or document.get("background"))


def _flag(document: dict[str, Any], name: str) -> bool:
    value = document.get(name)
    if value is not None and type(value) is not bool:
        raise InvalidRequest(f"The field {name!r} must be true or false.", param=name)
    return bool(value)


def _counting(options: Any) -> dict[str, Any] | None:
    """Stream options by which the engine reports usage; None if the client has asked for it, or for nonsense."""
    if options is None:
        return {"include_usage": True}
    if type(options) is not dict or options.get("include_usage") not in (None, False):
        return None
    return {name: options[name] for name in options if name != "continuous_usage_stats"} | {"include_usage": True}


def _limit(document: dict[str, Any]) -> int | None:
    """The client's bound on output tokens, if any. Raises InvalidRequest for counts that are none."""
    for name in ("n", "best_of"):
        _count(document, name, at_least=1)
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if (limit := _count(document, name, at_least=0)) is not None:
            return limit
    return None


def _count(document: dict[str, Any], name: str, at_least: int) -> int | None:
    value = document.get(name)
    if value is None or (type(value) is int and value >= at_least):
        return value
    raise InvalidRequest(f"The field {name!r} must be a whole number of at least {at_least}.", param=name)
