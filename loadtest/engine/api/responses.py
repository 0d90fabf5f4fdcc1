"""POST /v1/responses, GET /v1/responses/{id}, POST /v1/responses/{id}/cancel."""

from dataclasses import replace
from typing import Any

from aiohttp import web

from loadtest.engine.api.chat import chat_prompt, note, stream_events
from loadtest.engine.api.errors import ApiError, invalid, missing
from loadtest.engine.api.exchange import Body, json_answer, read_json, text_of
from loadtest.engine.api.response_events import ResponseEvents
from loadtest.engine.api.response_object import response_object
from loadtest.engine.generation import Generation
from loadtest.engine.ledger import Entry
from loadtest.engine.sampling import read_sampling
from loadtest.engine.service import Service
from loadtest.engine.steering import read_steering


async def create_response(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:
    """Answer an input, after the turns of an earlier response if one is named."""
    body = await read_json(request)
    turns = [*_earlier_turns(service, body), *_instructions(body), *_input_turns(body)]
    sampling = read_sampling(
        {key: body[key] for key in ("max_output_tokens", "stream", "temperature", "top_p") if key in body},
        ("max_output_tokens",),
        service.config.max_model_len,
    )
    model = service.check_model(body.get("model"))
    service.check_admission(1)
    prompt = chat_prompt(service, body, turns, model, body.get("cache_salt") or "")
    note(entry, model, [prompt])
    entry.request_id = service.request_id(request)
    steering = replace(read_steering(request.headers, body), rank=None)  # vLLM reads no rank here
    choice = service.choices([prompt], sampling, entry, steering)[0]
    response_id, message_id = f"resp_{service.new_id()}", f"msg_{service.new_id()}"
    created = service.created()
    if sampling.stream:
        events = ResponseEvents(body, response_id, message_id, model, created, choice)
        answer = await stream_events(service, request, entry, [choice], events)
        _store(service, body, events.final, turns)
        return answer
    with Generation(service.engine, [choice], entry) as generation:
        await generation.finished()
    value = response_object(body, response_id, message_id, model, created, choice, choice.sequence.output_tokens)
    _store(service, body, value, turns)
    return json_answer(value)


async def get_response(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    return json_answer(_stored(service, request.path.split("/")[3])["response"])


async def cancel_response(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """Only background responses can be cancelled, and there are none."""
    _stored(service, request.path.split("/")[3])
    raise ApiError(
        400, "Cannot cancel a synchronous response.", error_type="invalid_request_error", param="response_id"
    )


def _stored(service: Service, response_id: str) -> dict[str, Any]:
    stored: dict[str, Any] | None = service.responses.get(response_id)
    if stored is None:
        raise ApiError(404, f"Response with id '{response_id}' not found.", "invalid_request_error", "response_id")
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
