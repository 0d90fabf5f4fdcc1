"""Token counts of an answer, read from its bytes without parsing the rest of it."""

import re
from typing import Any

import orjson

from gateway.request import Usage

_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


def read_usage(*pieces: bytes) -> Usage | None:
    """The last usage in each of these pieces of an answer; later ones count over earlier ones.

    Understands OpenAI's names, of chat and of responses, and Anthropic's.
    """
    merged: dict[str, Any] = {}
    for piece in pieces:
        match = _USAGE.match(piece, piece.rfind(b'"usage"')) if piece else None
        if match is not None:
            try:
                merged |= orjson.loads(match[1])
            except orjson.JSONDecodeError:
                continue
    if not merged:
        return None
    details = merged.get("prompt_tokens_details") or merged.get("input_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else merged.get("cache_read_input_tokens")
    return Usage(
        _count(merged.get("prompt_tokens", merged.get("input_tokens"))),
        _count(merged.get("completion_tokens", merged.get("output_tokens"))),
        cached if type(cached) is int else None,
    )


def _count(value: Any) -> int:
    return value if type(value) is int else 0
