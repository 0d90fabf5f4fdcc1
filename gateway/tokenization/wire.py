"""What goes between the gateway and its tokenizer process: length, then MessagePack."""

from typing import Any, Final

import msgspec

LENGTH_BYTES: Final = 4


class LoadTokenizer(msgspec.Struct, tag=True, frozen=True):
    """Make a model's tokenizer ready."""

    number: int
    model: str
    source: str


class Job(msgspec.Struct, tag=True, frozen=True):
    """Tell a prompt's tokens. `features` are those that may be rendered: another one makes the answer unknown."""

    number: int
    model: str
    endpoint: str
    document: dict[str, Any]
    content_format: str
    features: list[str]


class Count(msgspec.Struct, tag=True, frozen=True):
    """Count the tokens of several texts, each by itself. `special`: with the special tokens that the model adds."""

    number: int
    model: str
    texts: list[str]
    special: bool


Question = LoadTokenizer | Job | Count


class TokenizerReply(msgspec.Struct, frozen=True):
    """What came of a question; without `tokens` (packed ids; none, but `counts`, for `Count`), `reason` says why."""

    number: int
    tokens: bytes | None = None
    reason: str = ""
    failed: bool = False  # by a fault, not because the prompt is none that can be told exactly
    seconds: float = 0.0
    segments: int = 0
    cached_segments: int = 0
    counts: list[int] = []


def framed(message: Question | TokenizerReply) -> bytes:
    """A message as it is sent. Raises TypeError or OverflowError for what MessagePack cannot hold."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def length_of(prefix: bytes) -> int:
    """How many bytes follow."""
    return int.from_bytes(prefix, "little")


def read_question(body: bytes) -> Question:
    """What the gateway asked."""
    question: Question = msgspec.msgpack.decode(body, type=Question)
    return question


def read_answer(body: bytes) -> TokenizerReply:
    """What the tokenizer process answered."""
    return msgspec.msgpack.decode(body, type=TokenizerReply)
