"""A client request as a value: its properties for the gateway, and the bytes to forward."""

from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, Self
from urllib.parse import quote

DONE_MARKER: Final = b"data: [DONE]"  # the last event of OpenAI's streams
SEVERAL_TENANTS = "(several)"  # the tenant of a request with inputs of several tenants
_IN_HEADERS = " !#$&'()*+,/:;=?@[]^_`{|}~"  # of a model's name, with letters, digits, - and .; not %
_MOST_TOKENS_PER_BYTE = 4  # a byte makes at most one, but some tokenizers spell a letter out before they count
_UNKNOWN_CONTEXT_TOKENS = 1048576  # of a model whose backend does not state it
_MOST_TEMPLATE_TOKENS = 4096  # of one prompt: added by a chat template or an instruction


class Kind(StrEnum):
    """The use of an engine by an endpoint; decides how a request is counted and routed."""

    GENERATE = "generate"  # prefill and decode: needs slots and KV cache, and benefits from a cached prefix
    POOL = "pool"  # embeddings, scores: one engine sequence an input, no decode
    LIGHT = "light"  # tokenize and look-ups: no engine sequence
    UPLOAD = "upload"  # audio: the body is streamed through, unread


class OfflineTerms(Protocol):
    """The terms of a waiting line of an offline batch. Batches create it; only their queue knows the rest.

    `expires_seconds`: the end of the batch's window, on the gateway's clock.
    """

    @property
    def expires_seconds(self) -> float: ...

    def as_short_call(self) -> "OfflineTerms":
        """The terms of a call that is not aborted when its lease is revoked, because it is short."""


@dataclass(slots=True, init=False)
class Demand:
    """The properties of a request for the scheduler: small values only. Never changed after its construction; not
    frozen, and with its constructor written out, because a compiled one costs a quarter.

    `keys`: the chained hashes of the prompt's prefix blocks. `edges`: the prompt's size up to the end of each block, in
    the unit of `prompt_size` (bytes; tokens in a replay). `ends`: the number of blocks up to the end of each message;
    None = prompts diverge at edges only. `turn`, `turn_end`: the number of blocks before and through the last answer in
    the conversation; 0 = it has none. `anchor_tokens`: the tokens of the first `anchor_size` of the prompt, as reported
    by an engine; 0 = not known. `learnable_bytes`: the size if bytes per token can be learned from it, else 0.
    `token_keys`: the keys of the engine's own blocks, where the prompt's tokens are known. `reads_cache`: false where
    the engine must compute every prompt token. `pinned`: the only backend that can answer, because it stores the
    response. `rank`: the engine of a backend that the client selects. `hint`: a hash of the client's session or cache
    key; 0 = none. `tenant`: shares the queue with other tenants in proportion to `weight`. `batch`: served after
    interactive requests. `deadline_seconds`: when the answer must have begun, on the gateway's clock.
    `generated_tokens`: at the end of the prompt, generated before as the beginning of this answer. `offline`: the
    request is a line of an offline batch.
    """

    model: str
    tenant: str
    weight: float
    batch: bool
    deadline_seconds: float | None
    keys: tuple[int, ...]
    edges: tuple[int, ...]
    ends: tuple[int, ...] | None
    prompt_size: int
    prompt_tokens: int
    turn: int
    turn_end: int
    anchor_size: int
    anchor_tokens: int
    learnable_bytes: int
    token_keys: tuple[int, ...]
    reads_cache: bool
    sequences: int
    divisible: bool
    output_tokens: int | None
    streams: bool
    size_bytes: int
    pinned: str | None
    rank: int | None
    hint: int
    generated_tokens: int
    offline: OfflineTerms | None

    def __init__(
        self,
        model: str,
        tenant: str = "",
        weight: float = 1.0,
        batch: bool = False,
        deadline_seconds: float | None = None,
        keys: tuple[int, ...] = (),
        edges: tuple[int, ...] = (),
        ends: tuple[int, ...] | None = None,
        prompt_size: int = 0,
        prompt_tokens: int = 1,
        turn: int = 0,
        turn_end: int = 0,
        anchor_size: int = 0,
        anchor_tokens: int = 0,
        learnable_bytes: int = 0,
        token_keys: tuple[int, ...] = (),
        reads_cache: bool = True,
        sequences: int = 1,
        divisible: bool = False,
        output_tokens: int | None = None,
        streams: bool = False,
        size_bytes: int = 0,
        pinned: str | None = None,
        rank: int | None = None,
        hint: int = 0,
        generated_tokens: int = 0,
        offline: OfflineTerms | None = None,
    ) -> None:
        self.model = model
        self.tenant = tenant
        self.weight = weight
        self.batch = batch
        self.deadline_seconds = deadline_seconds
        self.keys = keys
        self.edges = edges
        self.ends = ends
        self.prompt_size = prompt_size
        self.prompt_tokens = prompt_tokens
        self.turn = turn
        self.turn_end = turn_end
        self.anchor_size = anchor_size
        self.anchor_tokens = anchor_tokens
        self.learnable_bytes = learnable_bytes
        self.token_keys = token_keys
        self.reads_cache = reads_cache
        self.sequences = sequences
        self.divisible = divisible
        self.output_tokens = output_tokens
        self.streams = streams
        self.size_bytes = size_bytes
        self.pinned = pinned
        self.rank = rank
        self.hint = hint
        self.generated_tokens = generated_tokens
        self.offline = offline

    def wait_offline(self, terms: OfflineTerms) -> None:
        """Mark it as an offline line. The only change of a demand, before its placement: copies are slow."""
        self.offline = terms

    def tokens_of(self, blocks: int) -> int:
        """Tokens of the first blocks of the prompt, known or estimated."""
        if not blocks:
            return 0
        size, anchor = self.edges[blocks - 1], self.anchor_size
        return self._tokens_up_to(size) if anchor else self.prompt_tokens * size // max(1, self.prompt_size)

    def tokens_shared(self, blocks: int) -> int:
        """Expected tokens shared with a prompt that has exactly these first blocks in common.

        Prompts that diverge within a message do so at a random place of the next block.
        """
        if not blocks:
            return 0
        size, ends = self.edges[blocks - 1], self.ends
        if ends is not None and blocks < len(self.edges) and blocks not in ends:
            size += (self.edges[blocks] - size) // 2
        return self._tokens_up_to(size)

    def _tokens_up_to(self, size: int) -> int:
        anchor = self.anchor_size
        if size <= anchor:
            return self.anchor_tokens * size // anchor
        rest = (self.prompt_tokens - self.anchor_tokens) * (size - anchor) // max(1, self.prompt_size - anchor)
        return self.anchor_tokens + max(0, rest)


@dataclass(slots=True, init=False)
class Usage:
    """Tokens as the engine reports them; `cached_tokens` is None where it does not report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def __init__(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self | None:
        """Reads OpenAI's names, of chat and of responses, and Anthropic's. None = none was found."""
        if not found:
            return None
        is_chat = "prompt_tokens" in found
        prompt = found["prompt_tokens"] if is_chat else found.get("input_tokens")
        completion = found["completion_tokens"] if "completion_tokens" in found else found.get("output_tokens")
        cached, details = found.get("cache_read_input_tokens"), found.get("prompt_tokens_details")
        details = details or found.get("input_tokens_details")
        prompt = prompt if type(prompt) is int and prompt > 0 else 0
        if type(details) is dict:
            cached = details.get("cached_tokens")
        elif not is_chat:  # Anthropic counts cached input apart
            apart = cached, found.get("cache_creation_input_tokens")
            prompt += sum(tokens for tokens in apart if type(tokens) is int and tokens > 0)
        completion = completion if type(completion) is int and completion > 0 else 0
        return cls(prompt, completion, cached if type(cached) is int and cached >= 0 else None)


def most_prompt_tokens(prompts: int, size_bytes: int) -> int:
    """An upper bound of the tokens of this many prompts of text."""
    return _MOST_TOKENS_PER_BYTE * size_bytes + _MOST_TEMPLATE_TOKENS * (prompts or 1)


class BodyStream(Protocol):
    """A body that is passed on while it arrives."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None:
        """Discard the rest of the body, unread."""


class BackgroundRun:
    """The state of a request with `background: true`, which its engine continues after the answer.

    `response_id`: empty until the engine has assigned one. `ended`: the answer had the whole response.
    """

    __slots__ = ("ended", "response_id")

    def __init__(self) -> None:
        self.response_id = ""
        self.ended = False

    def began(self, response_id: str) -> None:
        self.response_id = response_id

    def end(self) -> None:
        self.ended = True


@dataclass(slots=True)
class ModelChoice:
    """The origin of a request's model, if it is not simply the client's choice.

    `alias`: the client's name for the model, used in its answer; empty = the client named the model itself.
    `fallbacks`: models that may replace it, in order; `remade` is the request for one of these. `fell_back_from`: the
    replaced model.
    """

    alias: str = ""
    fallbacks: tuple[str, ...] = ()
    remade: "Callable[[InferenceRequest, str], Generator[None, None, InferenceRequest]] | None" = None
    _: KW_ONLY
    fell_back_from: str = ""

    def headers(self, model: str) -> bytes:
        """Header lines of the response that name its model."""
        lines = b"x-gateway-model: %b\r\n" % _header_value(model)
        if self.fell_back_from:
            lines += b"x-gateway-fallback-from: %b\r\n" % _header_value(self.fell_back_from)
        return lines


def _header_value(name: str) -> bytes:
    return quote(name, safe=_IN_HEADERS).encode()


@dataclass(slots=True, init=False)
class InferenceRequest:
    """A valid request, ready to be placed and sent; never changed after its construction.

    `body` is sent to the backend; `target` is from a constant table, never the client's path. `headers` are complete
    header lines for the backend, each ending in CRLF.
    """

    endpoint: str
    kind: Kind
    method: bytes
    target: bytes
    demand: Demand
    request_id: str
    body: bytes
    upload: BodyStream | None
    worked_bytes: int  # input of the engine, for uploads
    content_type: bytes
    headers: bytes
    done_marker: bytes | None
    hides_usage: bool
    repeatable: bool
    on_opening: Callable[[str, bytes], None] | None  # gets the backend and the first bytes of a 200 response
    explains: bool  # the client requests an explanation of the placement
    document: dict[str, Any] | None  # the parsed body, until the prompt is tokenized
    salt: str  # of the prompt's KV cache blocks
    dispatcher: str  # by name; empty = the plain dispatcher
    work: Any  # the dispatcher's own data about it
    background: BackgroundRun | None  # the engine goes on after the answer
    model_choice: ModelChoice | None  # None = the client named the model, and it has no fallback
    tunnel: "Tunnel | None"  # a WebSocket session

    def __init__(
        self,
        endpoint: str,
        kind: Kind,
        method: bytes,
        target: bytes,
        demand: Demand,
        request_id: str,
        body: bytes = b"",
        upload: BodyStream | None = None,
        worked_bytes: int = 0,
        content_type: bytes = b"application/json",
        headers: bytes = b"",
        done_marker: bytes | None = None,
        hides_usage: bool = False,
        repeatable: bool = True,
        on_opening: Callable[[str, bytes], None] | None = None,
        explains: bool = False,
        document: dict[str, Any] | None = None,
        salt: str = "",
        dispatcher: str = "",
        work: Any = None,
        background: BackgroundRun | None = None,
        model_choice: ModelChoice | None = None,
        tunnel: "Tunnel | None" = None,
    ) -> None:
        self.endpoint = endpoint
        self.kind = kind
        self.method = method
        self.target = target
        self.demand = demand
        self.request_id = request_id
        self.body = body
        self.upload = upload
        self.worked_bytes = worked_bytes
        self.content_type = content_type
        self.headers = headers
        self.done_marker = done_marker
        self.hides_usage = hides_usage
        self.repeatable = repeatable
        self.on_opening = on_opening
        self.explains = explains
        self.document = document
        self.salt = salt
        self.dispatcher = dispatcher
        self.work = work
        self.background = background
        self.model_choice = model_choice
        self.tunnel = tunnel


class Sink(Protocol):
    """Where an answer goes: the client's side of the gateway."""

    begun: bool
    chunked: bool  # its body is sent in the chunks of HTTP/1.1

    @property
    def blocked(self) -> bool:
        """Backpressure: its buffer is full, so the backend must not be read."""

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None: ...

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        """The head of an answer of unknown length."""

    def set_backend_headers(self, lines: bytes) -> None:
        """Header lines about the attempt, which replace the lines of an earlier attempt."""

    def comment(self, blank_line: bool = True) -> None:
        """Keep-alive between two events of a stream. `blank_line`: not if they have ids, where it would be an event."""

    def write(self, data: bytes, framed: bool = False) -> bool:
        """Body bytes; `framed`: in chunks, as the body is sent. True = its buffer is full."""

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        """Call this when a full buffer has space again; None = call nothing."""

    def end(self) -> None: ...


class Tunnel(Sink, Protocol):
    """The client's side of a WebSocket session. `is_greeted`: it has the frame with which a backend opens a session."""

    is_greeted: bool

    def open(self, receive: Callable[[bytes], None]) -> None:
        """Complete the upgrade, if still to be done, and pass the client's bytes on from now on."""

    def checked(self, data: bytes) -> bytes:
        """The bytes to forward for bytes of the client. Raises a GatewayError if they end the session."""

    def pause_reading(self) -> None:
        """Backpressure: read nothing from the client until `resume_reading`."""

    def resume_reading(self) -> None: ...

    def spend(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The session's use so far. Raises QuotaExceeded if its API key has no tokens left."""


@dataclass(slots=True, init=False)
class UpstreamResult:
    """How a backend answered: status, reported usage, and when its first byte came (the loop's clock)."""

    status: int
    usage: Usage | None
    first_byte_seconds: float | None
    body: bytes
    content_type: bytes
    extra: bytes
    client_was_slow: bool  # backpressure: the client read it more slowly than it came

    def __init__(
        self,
        status: int,
        usage: Usage | None,
        first_byte_seconds: float | None,
        body: bytes = b"",
        content_type: bytes = b"",
        extra: bytes = b"",
        client_was_slow: bool = False,
    ) -> None:
        self.status = status
        self.usage = usage
        self.first_byte_seconds = first_byte_seconds
        self.body = body
        self.content_type = content_type
        self.extra = extra
        self.client_was_slow = client_was_slow

    def limit_usage(self, demand: Demand, context_tokens: int | None) -> bool:
        """Limit the reported usage to the possible use of the request. True = the report was possible.

        `context_tokens`: the model's limit for prompt and answer of one sequence; None = unknown.
        """
        usage = self.usage
        if usage is None:
            return False
        most = most_prompt = (context_tokens or _UNKNOWN_CONTEXT_TOKENS) * (demand.sequences or 1)
        if demand.learnable_bytes and demand.pinned is None:  # the prompt is text, and all in the request
            of_text = most_prompt_tokens(demand.sequences, demand.size_bytes)
            most_prompt = of_text if of_text < most else most
        prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        if prompt <= most_prompt and completion <= most and (cached is None or cached <= prompt):
            return True
        prompt = min(prompt, most_prompt)
        self.usage = Usage(prompt, min(completion, most), None if cached is None else min(cached, prompt))
        return False
