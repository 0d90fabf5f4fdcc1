"""Requests of known size and length. Every prompt is new, so that no earlier test's cached blocks count."""

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from openai.types.chat import ChatCompletionChunk

from tests.integration.fleet import CHAT_MODEL

# Far more than any deadline here lets an engine produce: such a request ends by being aborted.
ENDLESS_TOKENS = 7000
FILLER = "The quick brown fox jumps over the lazy dog while it reads the file line by line. "
PREFIX_REPEATS = 40  # enough text for many prefix blocks


def fresh(text: str = "Say something.") -> str:
    """A prompt that no engine has seen."""
    return f"{uuid4().hex} {text}"


def long_prefix() -> str:
    """A new text of about 3 kB, to be shared by several prompts."""
    return fresh(FILLER * PREFIX_REPEATS)


def chat(content: str | None = None, tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A chat request that produces exactly this many tokens."""
    messages = [{"role": "user", "content": fresh() if content is None else content}]
    body = {"model": CHAT_MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0}
    extra = {"ignore_eos": True, **more.pop("extra_body", {})}
    return {**body, "extra_body": extra, **more}


def as_json(request: dict[str, Any]) -> dict[str, Any]:
    """The same request as the SDK would send it."""
    return {**{key: value for key, value in request.items() if key != "extra_body"}, **request["extra_body"]}


def text_of(chunks: Iterable[ChatCompletionChunk]) -> str:
    """The text that a stream's chunks add up to."""
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
