"""Why a request goes where it goes: the response header, and dry runs at the admin port."""

from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.integration.fleet import CHAT_MODEL, EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.observed import samples
from tests.integration.predictions import Message, talk, text
from tests.integration.prompts import as_json, chat, fresh
from tests.integration.publishing import get

EXPLAIN = {"X-Gateway-Explain": "1"}
PARTS = {"ahead", "prefill", "cache", "stall", "steps", "slowdown", "slot", "memory", "adapter"}


@dataclass(frozen=True)
class Engine:
    """One engine's part of the header; times in milliseconds."""

    name: str
    cost: float
    hit: int
    is_open: bool
    parts: dict[str, float]


def engines_of(header: str) -> list[Engine]:
    """The header, read."""
    engines = []
    for told in header.split(", "):
        name, *fields = told.split(";")
        values = dict(field.split("=") for field in fields)
        cost, hit, is_open = float(values.pop("cost")), int(values.pop("hit")), values.pop("open") == "1"
        engines.append(Engine(name, cost, hit, is_open, {part: float(value) for part, value in values.items()}))
    return engines


async def dry_run(gateway: Gateway, body: dict[str, Any] | bytes, path: str = "") -> tuple[int, dict[str, Any]]:
    """Status and document of POST /admin/route."""
    data = {"data": body} if isinstance(body, bytes) else {"json": body}
    url = f"{gateway.admin_url}/admin/route" + (f"?path={path}" if path else "")
    async with aiohttp.ClientSession() as session, session.post(url, **data) as answer:
        return answer.status, await answer.json()


async def test_who_asks_is_told_what_each_engine_would_cost(client: AsyncOpenAI, fleet: Fleet) -> None:
    said: list[Message] = [{"role": "system", "content": text(Random(81), 4000)}]
    for turn in range(3):
        asked: list[Message] = [*said, {"role": "user", "content": fresh()}]
        answer = await talk(client, asked, extra_headers=EXPLAIN)
        assert answer.explained is not None
        engines = engines_of(answer.explained)
        assert {engine.name for engine in engines} == fleet.chat_names
        assert [engine.cost for engine in engines] == sorted(engine.cost for engine in engines)
        assert all(engine.is_open for engine in engines)
        assert (engines[0].name, engines[0].hit) == (answer.backend, answer.predicted)
        assert (engines[0].hit > 0) == (turn > 0)
        assert engines[1].hit == 0
        for engine in engines:
            assert engine.parts.keys() <= PARTS
            assert sum(engine.parts.values()) == pytest.approx(engine.cost, rel=0.002)  # four digits of each


@pytest.mark.parametrize("headers", [{}, {"X-Gateway-Explain": "0"}, {"X-Gateway-Explain": "yes"}])
async def test_nobody_else_is_told(client: AsyncOpenAI, headers: dict[str, str]) -> None:
    answer = await talk(client, [{"role": "user", "content": fresh()}], extra_headers=headers)
    assert answer.explained is None


async def test_streams_are_explained_too(client: AsyncOpenAI, fleet: Fleet) -> None:
    request = chat(fresh(), 3, stream=True, extra_headers=EXPLAIN)
    async with await client.chat.completions.create(**request) as stream:
        header = stream.response.headers["x-gateway-explain"]
        backend = stream.response.headers["x-gateway-backend"]
        async for _ in stream:
            pass
    engines = engines_of(header)
    assert {engine.name for engine in engines} == fleet.chat_names
    assert engines[0].name == backend


async def test_an_embeddings_request_is_explained(client: AsyncOpenAI, fleet: Fleet) -> None:
    raw = await client.embeddings.with_raw_response.create(
        model=EMBEDDING_MODEL, input=["one", "two"], extra_headers=EXPLAIN
    )
    [engine] = engines_of(raw.headers["x-gateway-explain"])
    assert (engine.name, engine.hit) == (raw.headers["x-gateway-backend"], 0)
    assert engine.name not in fleet.chat_names


def without_times(told: dict[str, Any]) -> dict[str, Any]:
    """A dry run's answer but for what changes as time passes."""
    timeless = [
        {name: value for name, value in each.items() if name not in ("cost", "cost_parts_ms")}
        for each in told["backends"]
    ]
    return told | {"backends": timeless}


async def test_a_dry_run_tells_where_a_request_then_goes_and_changes_nothing(
    client: AsyncOpenAI, gateway: Gateway
) -> None:
    async def records() -> list[int]:
        await samples(gateway.admin_url)  # what answers teach is learned by now
        shown = (await get(f"{gateway.admin_url}/admin/backends"))["backends"]
        return [each["prefix_record_bytes"] for each in shown]

    for _ in range(2):
        system: Message = {"role": "system", "content": text(Random(fresh()), 3000)}
        for _ in range(3):
            messages: list[Message] = [system, {"role": "user", "content": fresh()}]
            body = as_json(chat("", 4)) | {"messages": messages}
            before = await records()
            status, told = await dry_run(gateway, body)
            assert status == 200
            again = [(await dry_run(gateway, body))[1] for _ in range(3)]
            assert [without_times(each) for each in again] == [without_times(told)] * 3
            assert await records() == before
            answer = await talk(client, messages)
            assert (told["chosen"], told["backends"][0]["hit_tokens"]) == (answer.backend, answer.predicted)
            assert not told["waits"]
            assert sum(await records()) > sum(before)


async def test_what_it_tells_of_each_engine_adds_up(client: AsyncOpenAI, gateway: Gateway, fleet: Fleet) -> None:
    _, told = await dry_run(gateway, as_json(chat(text(Random(82), 6000))))
    assert (told["model"], told["policy"], told["queued_requests"]) == (CHAT_MODEL, "prefix", 0)
    assert {engine["backend"] for engine in told["backends"]} == fleet.chat_names
    for engine in told["backends"]:
        assert set(engine["cost_parts_ms"]) == PARTS
        assert sum(engine["cost_parts_ms"].values()) == pytest.approx(engine["cost"], abs=0.001)
    assert set(told["other_policies"].values()) <= fleet.chat_names


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "/v1/chat/completions"),
        ({"prompt": "Hi"}, "/v1/completions"),
        ({"prompt": [5, 6, 7]}, "/v1/completions"),
        ({"input": "Hi"}, "/v1/responses"),
        ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}, "/v1/messages"),
        ({"input": ["Hi", "there"]}, "/v1/embeddings"),
    ],
    ids=["chat", "completions", "token ids", "responses", "messages", "embeddings"],
)
async def test_any_endpoint_that_is_routed_by_its_body_can_be_tried(
    client: AsyncOpenAI, gateway: Gateway, fleet: Fleet, body: dict[str, Any], path: str
) -> None:
    model = EMBEDDING_MODEL if path == "/v1/embeddings" else CHAT_MODEL
    status, told = await dry_run(gateway, {"model": model, **body}, path)
    assert status == 200
    names = {engine["backend"] for engine in told["backends"]}
    assert names == (fleet.chat_names if model == CHAT_MODEL else {fleet.embedding_url.removeprefix("http://")})
    assert told["chosen"] in names
    if path != "/v1/embeddings":
        assert (await dry_run(gateway, {"model": model, **body}))[1]["chosen"] in names


@pytest.mark.parametrize(
    ("body", "path", "status", "param"),
    [
        (b'{"model": ', "", 400, None),
        (b"[]", "/v1/chat/completions", 400, None),
        ({"model": "nobody", "prompt": "Hi"}, "", 404, "model"),
        ({"model": CHAT_MODEL, "messages": [], "n": 0}, "", 400, "n"),
        ({"model": CHAT_MODEL, "prompt": "Hi"}, "/tokenize", 400, "path"),
        ({"model": CHAT_MODEL, "prompt": "Hi"}, "/v1/nothing", 404, None),
    ],
    ids=["bad JSON", "no object", "unknown model", "bad count", "not routed by its body", "unknown endpoint"],
)
async def test_what_would_be_refused_is_refused_in_the_same_words(
    client: AsyncOpenAI, gateway: Gateway, body: dict[str, Any] | bytes, path: str, status: int, param: str | None
) -> None:
    got, told = await dry_run(gateway, body, path)
    assert got == status
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert told["error"]["param"] == param
    assert told["error"]["message"]
