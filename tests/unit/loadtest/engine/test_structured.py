"""Answers in a form that the request prescribes, as the OpenAI client reads them, and as schemas want them."""

import json
from datetime import date
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from loadtest.engine.structured import Prescription, read_prescription

ASK = [{"role": "user", "content": "Plan a trip."}]


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class Stop(BaseModel):
    city: str = Field(min_length=3, max_length=40)
    nights: int = Field(ge=2, le=4)
    day: date
    price: float | None
    tags: list[str] = Field(min_length=3, max_length=3)
    nearby: list["Stop"] = []


class Trip(BaseModel):
    title: str
    mood: Mood
    kind: Literal["train"]
    stops: list[Stop]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def test_the_client_can_parse_an_answer_into_a_model(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model="sim", messages=ASK, response_format=Trip)
    trip = answer.choices[0].message.parsed
    assert isinstance(trip, Trip)
    assert trip.stops
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > len(answer.choices[0].message.content) / 4


async def test_a_stream_says_the_same(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="sim", messages=ASK, response_format=Trip) as stream:
        final = await stream.get_final_completion()
    whole = await client.chat.completions.parse(model="sim", messages=ASK, response_format=Trip)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


async def test_an_answer_that_may_not_be_long_enough_is_cut(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(model="sim", messages=ASK, response_format=Trip, max_tokens=5)


async def test_responses_can_be_parsed_too(client: AsyncOpenAI) -> None:
    answer = await client.responses.parse(model="sim", input="Plan a trip.", text_format=Trip)
    assert isinstance(answer.output_parsed, Trip)


@pytest.mark.parametrize(
    ("choice", "name", "reason"),
    [
        ("required", "look_up", "tool_calls"),
        ({"type": "function", "function": {"name": "book"}}, "book", "stop"),  # as vLLM has it
    ],
)
async def test_a_tool_is_called_if_one_has_to_be(client: AsyncOpenAI, choice: Any, name: str, reason: str) -> None:
    asked: dict[str, Any] = {
        "model": "sim",
        "messages": ASK,
        "tools": [tool("look_up"), tool("book")],
        "tool_choice": choice,
    }
    whole = (await client.chat.completions.create(**asked)).choices[0]
    [call] = whole.message.tool_calls
    assert (call.type, call.function.name, whole.finish_reason) == ("function", name, reason)
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert not whole.message.content
    deltas = [
        delta.tool_calls[0]
        async for chunk in await client.chat.completions.create(**asked, stream=True)
        if (delta := chunk.choices[0].delta).tool_calls
    ]
    assert (deltas[0].function.name, deltas[0].id is not None) == (name, True)
    assert {delta.function.name for delta in deltas[1:]} == {None}
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments


async def test_tools_that_need_not_be_called_are_not(client: AsyncOpenAI) -> None:
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        answer = await client.chat.completions.create(
            model="sim", messages=ASK, tools=[tool("a")], max_tokens=4, **more
        )
        assert answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None


async def test_a_choice_of_texts_and_a_schema_in_vllms_field(client: AsyncOpenAI) -> None:
    async def said(wanted: dict[str, Any]) -> str:
        more = {"structured_outputs": wanted}
        answer = await client.chat.completions.create(model="sim", messages=ASK, extra_body=more)
        return str(answer.choices[0].message.content)

    assert await said({"choice": ["yes", "no"]}) in ("yes", "no")
    assert isinstance(json.loads(await said({"json": {"type": "integer"}})), int)
    assert json.loads(await said({"json_object": True})) == {}


@pytest.mark.parametrize("schema", [{"type": "array", "minItems": "x"}, {"type": "integer", "minimum": "x"}])
async def test_a_schema_that_cannot_be_used_is_a_bad_request(client: AsyncOpenAI, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="schema cannot be used"):
        await client.chat.completions.create(model="sim", messages=ASK, response_format=form)


def made(schema: Any, seed: int = 1) -> Any:
    return json.loads(Prescription(schema).text(seed))


@given(st.integers(), st.integers(-50, 50), st.integers(0, 20), st.integers(1, 7))
def test_numbers_keep_within_their_bounds(seed: int, least: int, room: int, step: int) -> None:
    whole = {"type": "integer", "minimum": least, "maximum": least + room}
    assert least <= made(whole, seed) <= least + room
    wide = {"type": "integer", "exclusiveMinimum": least, "maximum": least + 20 * step, "multipleOf": step}
    assert least < made(wide, seed) <= least + 20 * step
    assert made(wide, seed) % step == 0
    assert made({"type": "number", "exclusiveMaximum": least}, seed) < least


@given(st.integers())
def test_the_keywords_of_schemas_are_followed(seed: int) -> None:
    assert made({"const": {"a": 1}}, seed) == {"a": 1}
    assert made({"type": ["null", "boolean"]}, seed) in (True, False)
    assert made({"anyOf": [{"type": "null"}, {"enum": [3]}]}, seed) == 3
    both = made(
        {
            "allOf": [{"properties": {"a": {"const": 1}}}, {"$ref": "#/$defs/b"}],
            "$defs": {"b": {"properties": {"b": {"const": 2}}}},
        },
        seed,
    )
    assert both == {"a": 1, "b": 2}
    assert len(
        set(made({"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True}, seed))
    ) in (2, 3)
    assert made({"type": "array", "prefixItems": [{"const": 1}], "items": False}, seed) == [1]
    assert len(made({"type": "string", "minLength": 30, "maxLength": 31}, seed)) in (30, 31)


def test_a_schema_that_refers_to_itself_comes_to_an_end() -> None:
    node: dict[str, Any] = {"properties": {"next": {"$ref": "#"}, "all": {"type": "array", "items": {"$ref": "#"}}}}
    assert "next" in made(node)
    assert made({"properties": {"next": {"$ref": "#"}}, "required": ["next"]})
    assert read_prescription({"response_format": {"type": "text"}, "tools": "x", "text": 5}) is None
