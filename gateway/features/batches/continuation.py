"""Which lines may be sent as streams that are continued after a cut, and the fields of their requests.

Only fields are allowed whose effect on the next token is the same when a part of the answer has become prompt:
penalties, stop strings, grammars and seeds see the answer alone.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import orjson

from gateway.features.batches.partial import PartialAnswer

_PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_LIMITS = ("max_completion_tokens", "max_tokens")
_LEAST_TOKENS = 32  # of a limit; a shorter answer starts anew after a pause
_ANY_VALUE = frozenset((
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens",
    "min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "allowed_token_ids", "user", "metadata", "priority",
    "safety_identifier", "prompt_cache_key", "cache_salt", "service_tier", "chat_template_kwargs", "reasoning_effort",
    "add_generation_prompt", "skip_special_tokens", "documents",
))  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "stream": (False,),
    "store": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "tools": ([],),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
_STREAMED_FIELDS = orjson.dumps(_STREAMED)[1:]


def can_continue(endpoint: str, document: Mapping[str, Any]) -> bool:
    """Whether the answer is the same, token by token at temperature 0, however often its stream is cut.

    The limit of its length must be its own: one that the engine adds would count from the last cut.
    """
    name = _PROMPTS.get(endpoint)
    if name is None or not any(_is_count(document.get(limit)) for limit in _LIMITS):
        return False
    if not (_is_plain_chat(document.get(name)) if name == "messages" else _is_one_prompt(document.get(name))):
        return False
    return all(_is_neutral(field, value) for field, value in document.items() if field not in _ANY_VALUE)


def saves_work(document: Mapping[str, Any]) -> bool:
    """Whether a pause may save so much of the answer that it is worth streaming, which costs the gateway more."""
    return max([value for name in _LIMITS if _is_count(value := document.get(name))]) >= _LEAST_TOKENS


def streamed(body: bytes, document: Mapping[str, Any]) -> bytes:
    """The body of a line, with fields by which an engine streams its answer with token ids and usage.

    `document` is the same, parsed, which `can_continue`.
    """
    if _STREAMED.keys().isdisjoint(document):
        return b"%b,%b" % (body[:-1], _STREAMED_FIELDS)
    return orjson.dumps({**document, **_STREAMED})


def continued_fields(document: Mapping[str, Any], partial: PartialAnswer) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if partial.is_chat:
        fields["kv_transfer_params"] = {"prompt_token_ids": partial.replay()}
    else:
        fields["prompt"] = partial.replay()
    for name, least in (*((limit, 1) for limit in _LIMITS), ("min_tokens", 0)):
        if _is_count(value := document.get(name)):
            fields[name] = max(least, value - partial.tokens)
    return fields


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_neutral(field: str, value: Any) -> bool:
    """Whether it is as if the field were not there. Types count: 0 log-probabilities are some, and False are none."""
    return value is None or any(type(value) is type(each) and value == each for each in _NEUTRAL.get(field, ()))


def _is_plain_chat(messages: Any) -> bool:
    """Whether all messages are text: an engine ignores token ids beside media."""
    if type(messages) is not list:
        return False
    return all(
        type(each) is dict and type(each.get("content")) is str and "tool_calls" not in each for each in messages
    )


def _is_one_prompt(prompt: Any) -> bool:
    if type(prompt) is str:
        return True
    return type(prompt) is list and bool(prompt) and all(type(each) is int for each in prompt)
