"""One client request, as a value: what the gateway acts on, and the bytes it forwards."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

SEVERAL_TENANTS = "(several)"  # the tenant of a request with inputs of more than one
_MOST_TOKENS_PER_BYTE = 4  # a byte makes one at most, but some tokenizers spell a letter out before they count
_MOST_TEMPLATE_TOKENS = 4096  # of one prompt: what a chat template or an instruction adds


class Kind(StrEnum):
    """What an endpoint does with an engine; decides how a request is counted and routed."""

    GENERATE = "generate"  # prefill and decode: takes slots, KV cache, and gains from a cached prefix
    POOL = "pool"  # embeddings, scores: one engine sequence an input, no decode
    LIGHT = "light"  # tokenize and look-ups: no engine sequence
    UPLOAD = "upload"  # audio: the body is streamed through, unread


@dataclass(slots=True)
class Ask:
    """What placement needs to know of a request: small values only, so that it could travel over a socket. Not changed
    once made (and not frozen, because that costs as much as the rest of making it).

    `keys` are the chained hashes of the prompt's prefix blocks, `edges` its size up to the end of each, in the unit of
    `prompt_size` (bytes; in a replay, tokens), `ends` how many of them there are up to the end of each message; None =
    prompts part at edges only. `turn` and `turn_end` count the keys before and through the last answer
    that the conversation has; 0 if it has none. `anchor_tokens` are the tokens of its first `anchor_size`, where an
    engine has told them. `learnable_bytes` is the size if that says something of bytes per token, else 0.
    `token_keys` are the keys of the engine's own blocks, where the prompt's tokens are known.
    `reads_cache`: the engine may use cached blocks (it does not where it has to tell of every prompt token).
    `pinned` names the one backend that can answer, for look-ups of what it stores; `rank` the one engine of a backend
    that the client asks for. `hint` stands for a session or a cache key that the client named; 0 = none.
    `tenant` shares the waiting line with others, in proportion to `weight`; `batch` comes after interactive requests.
    After `deadline_seconds`, on the gateway's clock, the client does not want an answer any more.
    """

    model: str
    keys: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    ends: tuple[int, ...] | None = None
    prompt_size: int = 0
    prompt_tokens: int = 1
    turn: int = 0
    turn_end: int = 0
    anchor_size: int = 0
    anchor_tokens: int = 0
    learnable_bytes: int = 0
    token_keys: tuple[int, ...] = ()
    reads_cache: bool = True
    sequences: int = 1
    divisible: bool = False
    output_tokens: int | None = None
    streams: bool = False
    size_bytes: int = 0
    pinned: str | None = None
    rank: int | None = None
    hint: int = 0
    tenant: str = ""
    weight: float = 1.0
    batch: bool = False
    deadline_seconds: float | None = None

    def tokens_of(self, blocks: int) -> int:
        """Tokens of the first blocks of the prompt, as far as they are known or can be guessed."""
        if not blocks:
            return 0
        size, anchor = self.edges[blocks - 1], self.anchor_size
        return self._tokens_up_to(size) if anchor else self.prompt_tokens * size // max(1, self.prompt_size)

    def tokens_shared(self, blocks: int) -> int:
        """Tokens that this prompt most likely shares with one that has just these blocks in common with it.

        If they part within a message, they do so anywhere in the next block.
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


@dataclass(slots=True)
class EmbeddingInputs:
    """What an embeddings request asks for, where its inputs may be sent together with those of others.

    `items` are texts, or lists of token ids. `template` is the rest of the body, up to where the inputs follow:
    requests may share a batch only if theirs are equal, and their `isolation`, which keeps an API key's inputs apart.
    """

    items: list[str] | list[list[int]]
    are_ids: bool
    sizes_bytes: list[int]
    template: bytes
    wants_floats: bool
    isolation: str = ""

    def only(self, places: list[int]) -> "EmbeddingInputs":
        items: Any = [self.items[place] for place in places]
        sizes = [self.sizes_bytes[place] for place in places]
        return EmbeddingInputs(items, self.are_ids, sizes, self.template, self.wants_floats, self.isolation)


@dataclass(slots=True)
class Pairs:
    """What a rerank or score request asks for, where each document can be scored without the others.

    All `documents` are scored against the one query, or each against the query in its place. `names` are those of the
    fields that hold the two, `fields` the rest of the body. `sizes_bytes` is of a document and its query together.
    """

    names: tuple[str, str]
    queries: str | list[str]
    documents: list[str]
    sizes_bytes: list[int]
    fields: dict[str, Any]
    ranks: bool  # most relevant first, and of these `top_n`; 0 = all
    top_n: int = 0

    @property
    def share_query(self) -> bool:
        """Whether there is one query for all."""
        return type(self.queries) is str or len(self.queries) == 1


@dataclass(slots=True)
class Usage:
    """Tokens as the engine reports them; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


def most_prompt_tokens(prompts: int, size_bytes: int) -> int:
    """More tokens than so many prompts of text can have together."""
    return _MOST_TOKENS_PER_BYTE * size_bytes + _MOST_TEMPLATE_TOKENS * max(1, prompts)


class BodyStream(Protocol):
    """A body that is sent on while it arrives."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None:
        """End it: the rest is not needed."""


@dataclass(slots=True)
class InferenceRequest:
    """A checked request, ready to be placed and sent.

    `body` is what the backend gets; `target` is from a constant table, never the client's path.
    `headers` are ready-made header lines (each ends in CRLF) that go to the backend.
    """

    endpoint: str
    kind: Kind
    method: bytes
    target: bytes
    ask: Ask
    request_id: str
    body: bytes = b""
    upload: BodyStream | None = None
    worked_bytes: int = 0  # that the engine works on, of uploads and of requests that it answers without generating
    content_type: bytes = b"application/json"
    headers: bytes = b""
    done_marker: bytes | None = None
    hides_usage: bool = False
    repeatable: bool = True
    on_opening: Callable[[bytes], None] | None = None  # told of the first bytes of an answer with status 200
    explains: bool = False  # the client wants to know why it goes where it goes
    document: dict[str, Any] | None = None  # the body, parsed, while its prompt may still be tokenized
    salt: str = ""  # of the prompt's KV cache blocks
    inputs: EmbeddingInputs | None = None  # that may be sent with those of other requests
    pairs: Pairs | None = None  # that may be sent in pieces
