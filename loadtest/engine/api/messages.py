"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's surface."""

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from loadtest.engine.api.chat import chat_prompt, stream_events
from loadtest.engine.api.errors import missing
from loadtest.engine.api.exchange import Body, json_answer, read_json, read_messages, text_of
from loadtest.engine.choice import Choice
from loadtest.engine.generation import Generation
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.request_parameters import read_sampling, read_steering
from loadtest.engine.service import Service

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    body = await read_json(request)
    if body.get("max_tokens") is None:
        raise missing("max_tokens", body)
    turns = _turns(body)
    fields: Body = {key: body[key] for key in ("max_tokens", "stream", "temperature", "top_p") if key in body}
    sampling = read_sampling(
        {**fields, "stop": body.get("stop_sequences")}, ("max_tokens",), service.config.max_model_len
    )
    model = service.check_model(body.get("model"))
    service.check_admission(1)
    prompt = chat_prompt(service, body, turns, model=model, cache_salt="")
    entry.note(service.request_id(request), model, [prompt.nonce])
    choices = service.choices([prompt], sampling, entry, read_steering(request.headers, {}))
    answer_id = f"chatcmpl-{entry.request_id}"
    if sampling.stream:
        return await stream_events(
            service, request, entry, choices=choices, events=MessageEvents(service, answer_id, model, choice=choices[0])
        )
    with Generation(service.engine, choices, entry) as generation:
        await generation.finished()
    choice = choices[0]
    stop_reason, stop_sequence = _stop_reason(choice)
    answer = {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": choice.text(0, choice.sequence.output_tokens)}],
        "model": model,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": _usage(service, choice),
    }
    return json_answer({key: value for key, value in answer.items() if value is not None})


async def count_tokens(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """The length of the prompt that a conversation makes."""
    body = await read_json(request)
    model = service.check_model(body.get("model"))
    count = chat_prompt(service, body, _turns(body), model=model, cache_salt="").tokens.num_tokens
    return json_answer({"input_tokens": count, "context_management": {"original_input_tokens": count}})


def _turns(body: Body) -> list[tuple[str, str]]:
    system = text_of(body.get("system"))
    return ([("system", system)] if system else []) + read_messages(body)


def _stop_reason(choice: Choice) -> tuple[str, str | None]:
    """Why the answer ended, and the stop sequence that ended it."""
    if choice.stop_reason is not None:
        return "stop_sequence", choice.stop_reason
    return _STOP_REASONS[choice.finish_reason], None


def _usage(service: Service, choice: Choice) -> dict[str, int]:
    """Tokens read from the cache or written to it are not input tokens, where they are reported at all."""
    sequence = choice.sequence
    if not service.config.prompt_tokens_details:
        return {"input_tokens": sequence.prompt_tokens, "output_tokens": sequence.output_tokens}
    return {
        "input_tokens": sequence.prompt_tokens - sequence.cached_tokens - sequence.created_cache_tokens,
        "output_tokens": sequence.output_tokens,
        "cache_creation_input_tokens": sequence.created_cache_tokens,
        "cache_read_input_tokens": sequence.cached_tokens,
    }


class MessageEvents:
    """The named events of a streamed message."""

    def __init__(self, service: Service, answer_id: str, model: str, *, choice: Choice) -> None:
        self._service = service
        self._id = answer_id
        self._model = model
        self._choice = choice

    def heading(self) -> Sequence[bytes]:
        return ()

    def opening(self) -> Sequence[bytes]:
        """The message and its only block begin."""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._choice.sequence.prompt_tokens, "output_tokens": 0},
        }
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return _event({"type": "message_start", "message": message}), _event(block)

    def tokens(self, choice: Choice, start: int, stop: int, last: bool) -> Sequence[bytes]:
        """The text of the new tokens; a token without text (the end of the sequence) makes no event."""
        text = choice.text(start, stop)
        events = []
        if text:
            delta = {"type": "text_delta", "text": text}
            events.append(_event({"type": "content_block_delta", "delta": delta, "index": 0}))
        if last:
            events.append(_event({"type": "content_block_stop", "index": 0}))
        return events

    def closing(self) -> Sequence[bytes]:
        """Why it ended, and the usage."""
        stop_reason, stop_sequence = _stop_reason(self._choice)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return (_event({"type": "message_delta", "delta": delta, "usage": _usage(self._service, self._choice)}),)

    def done(self) -> Sequence[bytes]:
        return (_event({"type": "message_stop"}),)


def _event(value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value))
