"""The Responses API: create, get and cancel, in the background too; the `response` object and its stream events."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from loadtest.engine.api.chat import chat_prompt, stream_events
from loadtest.engine.api.errors import ApiError, invalid, missing
from loadtest.engine.api.exchange import Body, json_answer, read_json, text_of
from loadtest.engine.choice import Choice
from loadtest.engine.generation import Generation
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.request_parameters import read_sampling, read_steering
from loadtest.engine.service import Service


def response_object(
    body: dict[str, Any],
    response_id: str,
    message_id: str,
    model: str,
    created: int,
    choice: Choice,
    finished_tokens: int | None,
) -> dict[str, Any]:
    """The object with its output and usage; `finished_tokens` is None while it is in progress."""
    finished = finished_tokens is not None
    cut = finished and choice.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    return {
        "id": response_id,
        "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": model,
        "object": "response",
        "output": [message_item(message_id, choice.text(0, finished_tokens))] if finished_tokens is not None else [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": 1.0 if body.get("temperature") is None else float(body["temperature"]),
        "tool_choice": body.get("tool_choice", "none" if not body.get("tools") else "auto"),
        "tools": body.get("tools") or [],
        "top_p": float(body.get("top_p") or 1.0),
        "background": bool(body.get("background")),
        "max_output_tokens": body.get("max_output_tokens") or choice.sequence.output_tokens,
        "max_tool_calls": None,
        "previous_response_id": body.get("previous_response_id"),
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": status if finished else "in_progress",
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": _usage(choice) if finished else None,
        "user": body.get("user"),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def message_item(message_id: str, text: str | None) -> dict[str, Any]:
    """The output message, still empty if the text is None."""
    content = [] if text is None else [text_part(text)]
    status = "in_progress" if text is None else "completed"
    return {
        "id": message_id,
        "content": content,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def text_part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    """The text of an output message."""
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _usage(choice: Choice) -> dict[str, Any]:
    sequence = choice.sequence
    return {
        "input_tokens": sequence.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": sequence.cached_tokens,
            "cache_write_tokens": sequence.created_cache_tokens,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": sequence.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": sequence.prompt_tokens + sequence.output_tokens,
    }


class ResponseEvents:
    """Renders the events; `final` is the complete response once the stream has closed."""

    def __init__(
        self, body: dict[str, Any], response_id: str, *, message_id: str, model: str, created: int, choice: Choice
    ) -> None:
        self._fields = (body, response_id, message_id, model, created, choice)
        self._message_id = message_id
        self._choice = choice
        self._number = -1
        self.final: dict[str, Any] = {}

    def heading(self) -> Sequence[bytes]:
        """The response begins, as soon as it is accepted."""
        begun = response_object(*self._fields, None)
        return (
            self._event("response.created", {"response": begun}),
            self._event("response.in_progress", {"response": begun}),
        )

    def opening(self) -> Sequence[bytes]:
        """Its message and the message's text begin."""
        item = {"item": message_item(self._message_id, None), "output_index": 0}
        part = {**self._place(), "part": text_part("", [])}
        return (
            self._event("response.output_item.added", item),
            self._event("response.content_part.added", part),
        )

    def tokens(self, choice: Choice, start: int, stop: int, last: bool) -> Sequence[bytes]:
        """The text of the new tokens; after the last one, the whole text again."""
        events = []
        text = choice.text(start, stop)
        if text:
            events.append(self._event("response.output_text.delta", {**self._place(), "delta": text, "logprobs": []}))
        if last:
            whole = choice.text(0, stop)
            events.append(self._event("response.output_text.done", {**self._place(), "logprobs": [], "text": whole}))
            events.append(self._event("response.content_part.done", {**self._place(), "part": text_part(whole)}))
            item = {"item": message_item(self._message_id, whole), "output_index": 0}
            events.append(self._event("response.output_item.done", item))
        return events

    def closing(self) -> Sequence[bytes]:
        """Nothing goes between the text and the final marker."""
        return ()

    def done(self) -> Sequence[bytes]:
        self.final = response_object(*self._fields, self._choice.sequence.output_tokens)
        return (self._event("response.completed", {"response": self.final}),)

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._message_id, "output_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        ordered = dict(sorted({**fields, "sequence_number": self._number, "type": name}.items()))
        return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(ordered))


async def create_response(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """Answer an input, after the turns of an earlier response if one is named."""
    body = await read_json(request)
    turns = [*_earlier_turns(service, body), *_instructions(body), *_input_turns(body)]
    sampling = read_sampling(
        {key: body[key] for key in ("max_output_tokens", "stream", "temperature", "text", "top_p") if key in body},
        ("max_output_tokens",),
        service.config.max_model_len,
    )
    model = service.check_model(body.get("model"))
    service.check_admission(1)
    prompt = chat_prompt(service, body, turns, model=model, cache_salt=body.get("cache_salt") or "")
    entry.note(service.request_id(request), model, [prompt.nonce])
    steering = replace(read_steering(request.headers, body), rank=None)  # vLLM reads no rank here
    choice = service.choices([prompt], sampling, entry, steering)[0]
    response_id, message_id = f"resp_{service.new_id()}", f"msg_{service.new_id()}"
    created = service.created()
    if body.get("background") and not sampling.stream:
        return _in_background(
            service, body, turns=turns, entry=entry, choice=choice, names=(response_id, message_id, model, created)
        )
    if sampling.stream:
        events = ResponseEvents(body, response_id, message_id=message_id, model=model, created=created, choice=choice)
        answer = await stream_events(service, request, entry, choices=[choice], events=events)
        _store(service, body, events.final, turns)
        return answer
    with Generation(service.engine, [choice], entry) as generation:
        await generation.finished()
    value = response_object(
        body,
        response_id,
        message_id=message_id,
        model=model,
        created=created,
        choice=choice,
        finished_tokens=choice.sequence.output_tokens,
    )
    _store(service, body, value, turns)
    return json_answer(value)


def _in_background(
    service: Service,
    body: dict[str, Any],
    turns: list[tuple[str, str]],
    entry: LedgerEntry,
    choice: Choice,
    names: tuple[str, str, str, int],
) -> web.StreamResponse:
    """Answer that the response is queued, which it is until it is complete, and generate it."""
    if not service.config.responses_store:
        text = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise ApiError(400, text, "invalid_request_error", param="background")
    queued = {**response_object(body, *names, choice, None), "status": "queued"}
    service.responses[names[0]] = {"response": queued, "turns": turns}

    async def generate() -> None:
        with Generation(service.engine, [choice], entry) as generation:
            await generation.finished()
        _store(service, body, response_object(body, *names, choice, choice.sequence.output_tokens), turns)

    task = asyncio.get_running_loop().create_task(generate())
    service.background[names[0]] = task
    task.add_done_callback(lambda _: service.background.pop(names[0], None))
    return json_answer(queued)


async def get_response(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    return json_answer(_stored(service, request.path.split("/")[3])["response"])


async def cancel_response(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:  # noqa: ARG001
    """Only background responses that are not complete can be cancelled."""
    response_id = request.path.split("/")[3]
    response: dict[str, Any] = _stored(service, response_id)["response"]
    if response["status"] != "queued":
        raise ApiError(
            400, "Cannot cancel a synchronous response.", error_type="invalid_request_error", param="response_id"
        )
    response["status"] = "cancelled"
    if task := service.background.get(response_id):
        task.cancel()
    return json_answer(response)


def _stored(service: Service, response_id: str) -> dict[str, Any]:
    stored: dict[str, Any] | None = service.responses.get(response_id)
    if stored is None:
        raise ApiError(
            404, f"Response with id '{response_id}' not found.", "invalid_request_error", param="response_id"
        )
    return stored


def _store(service: Service, body: Body, value: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    if service.config.responses_store and body.get("store", True):
        answer = value["output"][0]["content"][0]["text"]
        service.responses[value["id"]] = {"response": value, "turns": [*turns, ("assistant", answer)]}


def _earlier_turns(service: Service, body: Body) -> list[tuple[str, str]]:
    earlier = body.get("previous_response_id")
    if earlier is None:
        return []
    turns: list[tuple[str, str]] = _stored(service, str(earlier))["turns"]
    return turns


def _instructions(body: Body) -> list[tuple[str, str]]:
    return [("system", text_of(body["instructions"]))] if body.get("instructions") else []


def _input_turns(body: Body) -> list[tuple[str, str]]:
    value = body.get("input")
    if value is None:
        raise missing("input", body)
    if isinstance(value, str):
        return [("user", value)]
    if not isinstance(value, list):
        raise invalid("body.input", "string_type", "Input should be a valid string", value)
    turns = []
    for item in value:
        if not isinstance(item, dict):
            raise invalid("body.input", "dict_type", "Input should be a valid dictionary", item)
        content = item.get("content", item.get("output", item.get("arguments")))
        turns.append((str(item.get("role") or item.get("type") or "user"), text_of(content)))
    return turns
