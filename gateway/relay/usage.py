"""Token counts of an answer, read from its bytes without parsing the rest of it."""

import re
from dataclasses import dataclass
from typing import Any

import orjson

_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


@dataclass(slots=True)
class Usage:
    """Tokens as the engine reports them; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


def read_usage(*pieces: bytes) -> Usage | None:
    """The usage in these pieces of an answer; later ones count over earlier ones. Understands OpenAI's chat and
    Responses names and Anthropic's.
    """
    merged: dict[str, Any] = {}
    for piece in pieces:
        for match in _USAGE.finditer(piece):
            try:
                merged |= orjson.loads(match[1])
            except orjson.JSONDecodeError:
                continue
    if not merged:
        return None
    prompt = _count(merged, "prompt_tokens", "input_tokens")
    completion = _count(merged, "completion_tokens", "output_tokens")
    details = merged.get("prompt_tokens_details") or merged.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else merged.get("cache_read_input_tokens")
    return Usage(prompt, completion, cached if isinstance(cached, int) else None)


def _count(usage: dict[str, Any], *names: str) -> int:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int):
            return value
    return 0
