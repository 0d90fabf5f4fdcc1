"""Token counts of an answer, read from its bytes without parsing the rest of it, and held to what can be."""

import re
from typing import Any

import orjson

from gateway.relay.events import EVENT_END, document_of
from gateway.request import Ask, Usage, most_prompt_tokens

_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_UNKNOWN_CONTEXT_TOKENS = 1048576  # of a model whose backend does not state it
_MOST_TRIES = 8  # places in a piece that look like usage, from the last one on


def read_usage(tail: bytes) -> Usage | None:
    """The last usage in the end of a plain answer.

    Understands OpenAI's names, of chat and of responses, and Anthropic's.
    """
    return _usage(_last_usage(tail))


def read_stream_usage(*pieces: bytes) -> Usage | None:
    """The usage in these pieces of a stream; later events count over earlier ones.

    What a request has brought along (tools, metadata) may be named so too: only the places count where engines put it.
    """
    merged: dict[str, Any] = {}
    for piece in pieces:
        for event in EVENT_END.split(piece):
            if b'"usage"' not in event:
                continue
            document = document_of(event)
            if document is None:
                merged |= _last_usage(event)  # part of an event that was too long
                continue
            for holder in (document, document.get("response"), document.get("message")):
                if type(holder) is dict and type(found := holder.get("usage")) is dict:
                    merged |= found
    return _usage(merged)


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


def _usage(found: dict[str, Any]) -> Usage | None:
    if not found:
        return None
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    cached = details.get("cached_tokens") if type(details) is dict else found.get("cache_read_input_tokens")
    return Usage(
        _count(found.get("prompt_tokens", found.get("input_tokens"))),
        _count(found.get("completion_tokens", found.get("output_tokens"))),
        cached if type(cached) is int and cached >= 0 else None,
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
