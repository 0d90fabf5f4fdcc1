"""One client request, as a value: what the gateway acts on, and the bytes it forwards."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum


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

    `keys` are the chained hashes of the prompt's prefix blocks, `prompt_bytes` their text's length.
    `pinned` names the one backend that can answer, for look-ups of what it stores.
    """

    model: str
    keys: tuple[int, ...] = ()
    prompt_bytes: int = 0
    prompt_tokens: int = 1
    sequences: int = 1
    divisible: bool = False
    output_tokens: int | None = None
    streams: bool = False
    size_bytes: int = 0
    pinned: str | None = None


@dataclass(slots=True)
class Usage:
    """Tokens as the engine reports them; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


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
    upload: AsyncIterator[bytes] | None = None
    content_type: bytes = b"application/json"
    headers: bytes = b""
    done_marker: bytes | None = None
    hides_usage: bool = False
    repeatable: bool = True
