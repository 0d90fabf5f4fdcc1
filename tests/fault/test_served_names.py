"""Engines under several names, as with vLLM's `--served-model-name a b c`: one model to the gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import orjson
import pytest

from tests.clients import Answer, chat, request
from tests.fault.rig import UnderTest, running
from tests.scripted import Connection, ScriptedBackend
from tests.scripts import DONE_EVENT, chunk, completion, head, last_chunk, one_of, whole

NAMES = ("a", "b", "c")
LORA = {"id": "lora", "root": "/adapters/lora", "parent": "a"}
CARDS = (*[{"id": name, "root": "/weights"} for name in NAMES], LORA)
PREFIX = {"routing": {"policy": "prefix"}}
USAGE = {"prompt_tokens": 2500, "completion_tokens": 1, "total_tokens": 2501}
PROMPT = "A long prompt that several names have in common. " * 200


async def as_vllm(connection: Connection) -> None:
    """Answer under the first name, whichever was asked for; adapters under their own."""
    assert connection.seen is not None
    body = orjson.loads(connection.seen.body)
    model = body["model"] if body["model"] == "lora" else "a"
    if not body.get("stream"):
        connection.send(whole(200, orjson.dumps({"model": model, **completion("ok"), "usage": USAGE})))
        return
    choice = {"index": 0, "delta": {"content": "x"}}
    event = {"id": "1", "object": "chat.completion.chunk", "model": model, "choices": [choice]}
    for step in (head(200), chunk(b"data: " + orjson.dumps(event) + b"\n\n"), chunk(DONE_EVENT), last_chunk()):
        await step(connection)


@pytest.fixture
async def engines() -> AsyncIterator[list[ScriptedBackend]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(ScriptedBackend("a")) for _ in range(4)]
        for each in found:
            each.cards = CARDS
            each.plays(as_vllm)
        yield found


async def ask(under_test: UnderTest, model: str, **more: object) -> Answer:
    return await under_test.ask(chat(PROMPT, model=model, **more))


def hit(answer: Answer) -> int:
    """Tokens of the prompt that its engine should have cached."""
    return int(answer.header("x-gateway-prefix-tokens") or 0)


async def test_all_names_of_an_engine_share_what_its_cache_holds(engines: list[ScriptedBackend]) -> None:
    async with running(*engines, sections=PREFIX) as under_test:
        first = await ask(under_test, "a")
        for name in (*NAMES, *NAMES):
            answer = await ask(under_test, name)
            assert answer.header("x-gateway-backend") == first.header("x-gateway-backend")
            assert hit(answer) > 1000
        lora = await ask(under_test, "lora")
        assert hit(lora) == 0  # an adapter's cache is its own


@pytest.mark.parametrize("streams", [False, True])
async def test_answers_have_the_name_that_was_asked_for(engines: list[ScriptedBackend], streams: bool) -> None:
    async with running(*engines) as under_test:
        for name in (*NAMES, "lora"):
            answer = await ask(under_test, name, stream=streams)
            first = orjson.loads(answer.events[0].removeprefix(b"data: ")) if streams else answer.json
            assert first["model"] == name
        listed = await under_test.ask(b"", target=b"/v1/models", method=b"GET")
        assert [card["id"] for card in listed.json["data"]] == [*NAMES, "lora"]


async def test_names_with_settings_of_their_own_stay_themselves(engines: list[ScriptedBackend]) -> None:
    sections = {**PREFIX, "models": {"b": {"fallback": ["lora"]}}}
    async with running(*engines, sections=sections) as under_test:
        await ask(under_test, "a")
        answer = await ask(under_test, "b")
        assert answer.json["model"] == "a"
        assert hit(answer) > 1000  # the weights are still the same


async def test_aliases_of_the_configuration_may_stand_for_any_name(engines: list[ScriptedBackend]) -> None:
    sections = {**PREFIX, "models": {"aliases": {"gpt": "c", "b": "lora"}}}
    async with running(*engines, sections=sections) as under_test:
        await ask(under_test, "a")
        answer = await ask(under_test, "gpt")
        assert answer.json["model"] == "gpt"
        assert hit(answer) > 1000
        assert (await ask(under_test, "b")).header("x-gateway-model") == "lora"


async def test_names_wait_in_one_line_for_the_same_engines(backend: ScriptedBackend) -> None:
    allowed = asyncio.Semaphore(0)
    backend.cards = CARDS
    backend.plays(one_of(allowed), as_vllm)
    async with running(backend, per_backend={"max_in_flight": 1}) as under_test, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await under_test.client()) for _ in range(6)]
        for client, name in zip(clients, (*NAMES, *NAMES), strict=True):
            await client.send(request(chat(model=name)))
        async with asyncio.timeout(20):
            while len(under_test.gateway.core.queue) < 5:
                await asyncio.sleep(0.01)
        assert {ticket.demand.model for ticket in under_test.gateway.core.queue} == {"a"}
        for _ in clients:
            allowed.release()
        assert [(await client.answer()).json["model"] for client in clients] == [*NAMES, *NAMES]
