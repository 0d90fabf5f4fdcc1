"""Token counts of an answer, read from its bytes without parsing the rest of it, and held to what can be."""

import re
from typing import Any

import orjson

from gateway.request import Ask, Usage, most_prompt_tokens

_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_UNKNOWN_CONTEXT_TOKENS = 1048576  # of a model whose backend does not state it
_MOST_TRIES = 8  # places in a piece that look like usage, from the last one on


def read_usage(*pieces: bytes) -> Usage | None:
    """The last usage in each of these pieces of an answer; later ones count over earlier ones.

    Understands OpenAI's names, of chat and of responses, and Anthropic's.
    """
    merged: dict[str, Any] = {}
    for piece in pieces:
        merged |= _last_usage(piece)
    if not merged:
        return None
    details = merged.get("prompt_tokens_details") or merged.get("input_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else merged.get("cache_read_input_tokens")
    return Usage(
        _count(merged.get("prompt_tokens", merged.get("input_tokens"))),
        _count(merged.get("completion_tokens", merged.get("output_tokens"))),
        cached if type(cached) is int and cached >= 0 else None,
    )


def possible(usage: Usage, ask: Ask, context_tokens: int | None) -> Usage:
    """The usage itself, if the request could have used so much; else as much of it as the request could have.

    `context_tokens` is the most that the model takes in one sequence, prompt and answer; None = not known.
    """
    most = (context_tokens or _UNKNOWN_CONTEXT_TOKENS) * max(1, ask.sequences)
    most_prompt = most
    if ask.learnable_bytes and ask.pinned is None:  # the prompt is text, and all in the request
        most_prompt = min(most, most_prompt_tokens(ask.sequences, ask.size_bytes))
    prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    if prompt <= most_prompt and completion <= most and (cached is None or cached <= prompt):
        return usage
    prompt = min(prompt, most_prompt)
    return Usage(prompt, min(completion, most), None if cached is None else min(cached, prompt))


def _last_usage(piece: bytes) -> dict[str, Any]:
    """The last object in a piece that is named so; other values of that name are passed over."""
    end = len(piece)
    for _ in range(_MOST_TRIES):
        place = piece.rfind(b'"usage"', 0, end)
        if place < 0:
            break
        match = _USAGE.match(piece, place)
        if match is not None:
            try:
                found = orjson.loads(match[1])
            except orjson.JSONDecodeError:
                found = {}
            if found:
                return dict(found)
        end = place
    return {}


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
