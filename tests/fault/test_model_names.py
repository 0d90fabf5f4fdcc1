"""Aliases and fallback models on real sockets: the name that the client used, and another model in its place."""

import asyncio
from typing import Any

import orjson
import pytest
from openai import AsyncOpenAI

from tests.clients import chat
from tests.fault.rig import CLIENT_KEY, UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import DONE_EVENT, Step, answer, chunk, fin, hang, head, last_chunk, raw, stream, whole

ALIAS: dict[str, Any] = {"models": {"aliases": {"gpt-4o": MODEL}}}
SPARE = "spare"
FALLBACK: dict[str, Any] = {"models": {"aliases": {"gpt-4o": MODEL}, MODEL: {"fallback": [SPARE]}}}
HOSTILE = [
    '"model":"scripted"',
    '","model":"scripted"}',
    '\\"model\\":\\"scripted\\"',
    'data: {"model":"scripted"}\n\n',
]


def sdk(under_test: UnderTest) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{under_test.port}/v1", api_key=CLIENT_KEY, max_retries=0)


def named(text: str) -> dict[str, Any]:
    """An answer in the order of vLLM's fields, with tool calls that name the model, too."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"model":"scripted"}'}}
    message = {"role": "assistant", "content": text, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {
        "id": "c-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage
    }  # fmt: skip


def json(document: dict[str, Any], status: int = 200) -> tuple[Step, ...]:
    return answer(status, document)


def events(texts: list[str], together: int) -> tuple[Step, ...]:
    """A stream of these texts, so many events in a chunk."""
    made = []
    for text in texts:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        document = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
        made.append(b"data: %b\n\n" % orjson.dumps(document))
    made.append(DONE_EVENT)
    chunks = [b"".join(made[start : start + together]) for start in range(0, len(made), together)]
    return (head(200), *map(chunk, chunks), last_chunk())


async def test_generated_text_that_looks_like_the_name_stays_as_it_is(backend: ScriptedBackend) -> None:
    messages: Any = [{"role": "user", "content": "Hello."}]
    async with running(backend, sections=ALIAS) as under_test, sdk(under_test) as client:
        for text in HOSTILE:
            backend.plays(*json(named(text)))
            answer = await client.chat.completions.create(model="gpt-4o", messages=messages)
            assert answer.model == "gpt-4o"
            assert answer.choices[0].message.model_dump() == answer.choices[0].message.model_dump() | {"content": text}
            assert answer.choices[0].message.tool_calls is not None
            assert (
                answer.choices[0].message.tool_calls[0].model_dump()["function"]["arguments"] == '{"model":"scripted"}'
            )
        for together in (1, 2, 9):
            backend.plays(*events(HOSTILE, together))
            chunks = [
                each
                async for each in await client.chat.completions.create(model="gpt-4o", messages=messages, stream=True)
            ]
            assert [each.model for each in chunks] == ["gpt-4o"] * len(HOSTILE)
            assert [each.choices[0].delta.content for each in chunks] == HOSTILE
        assert {orjson.loads(seen.body)["model"] for seen in backend.ledger} == {MODEL}
    lines = [orjson.loads(line) for line in under_test.log.getvalue().splitlines()]
    assert {(line["model"], line["alias"], line["fell_back_from"]) for line in lines} == {(MODEL, "gpt-4o", None)}


async def test_tools_that_a_model_calls_keep_their_arguments(backend: ScriptedBackend) -> None:
    tool = {"type": "tool_use", "id": "t", "name": "f", "input": {"model": MODEL}}
    document = {"id": "msg", "type": "message", "content": [tool], "model": MODEL, "usage": {"output_tokens": 3}}
    backend.plays(*json(document))
    async with running(backend, sections=ALIAS) as under_test:
        answer = await under_test.ask(chat(model="gpt-4o", max_tokens=3), target=b"/v1/messages")
        assert orjson.loads(answer.body) == document | {"model": "gpt-4o"}
        assert answer.header("x-gateway-model") == MODEL


async def test_requests_without_an_alias_say_nothing_of_one(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3))
    async with running(backend, sections=ALIAS) as under_test:
        answer = await under_test.ask(chat(stream=True))
        assert answer.header("x-gateway-model") is None
    assert "alias" not in orjson.loads(under_test.log.getvalue())


@pytest.mark.parametrize("model", [MODEL, "gpt-4o"])
async def test_while_a_models_backend_is_down_its_fallback_answers(backend: ScriptedBackend, model: str) -> None:
    backend.plays(*json(named("own")))
    async with ScriptedBackend(SPARE) as spare, running(backend, spare, sections=FALLBACK) as under_test:
        spare.plays(*json(named("spare") | {"model": SPARE}))
        assert (await under_test.ask(chat(model=model))).header("x-gateway-fallback-from") is None
        await backend.stop()
        for _ in range(3):  # the first one finds out
            answer = await under_test.ask(chat(model=model))
            assert answer.status == 200
            assert (answer.header("x-gateway-model"), answer.header("x-gateway-fallback-from")) == (SPARE, MODEL)
            assert orjson.loads(answer.body)["model"] == (SPARE if model == MODEL else "gpt-4o")
        assert [orjson.loads(seen.body)["model"] for seen in spare.ledger] == [SPARE] * 3
        assert sum(under_test.gateway.core.metrics.fallbacks.values.values()) == 3
        await backend.start()
        await holds(lambda: bool(under_test.gateway.core.fleet.serving(MODEL)), "its own backend is back")
        assert (await under_test.ask(chat(model=model))).header("x-gateway-fallback-from") is None
    last_but_one = orjson.loads(under_test.log.getvalue().splitlines()[-2])
    assert (last_but_one["model"], last_but_one["fell_back_from"]) == (SPARE, MODEL)


async def test_a_client_that_refuses_fallbacks_waits(backend: ScriptedBackend) -> None:
    async with ScriptedBackend(SPARE) as spare, running(backend, spare, sections=FALLBACK) as under_test:
        await backend.stop()
        asked = asyncio.create_task(under_test.ask(chat(), b"x-gateway-fallback: none"))
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "it waits")
        await backend.start()
        answer = await asked
        assert (answer.status, answer.header("x-gateway-model")) == (200, None)
        assert (await under_test.ask(chat(), b"x-gateway-fallback: never")).status == 400
        assert spare.ledger == []


async def test_requests_that_wait_fall_back_when_the_last_backend_is_lost(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with (
        ScriptedBackend(SPARE) as spare,
        running(backend, spare, sections=FALLBACK, per_backend={"max_in_flight": 2}) as under_test,
    ):
        spare.plays(*stream(3))
        asked = [asyncio.create_task(under_test.ask(chat(stream=True))) for _ in range(4)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 2, "two run, two wait")
        await backend.stop()
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 4
        assert [answer.header("x-gateway-model") for answer in answers] == [SPARE] * 4


async def test_a_full_queue_sends_what_is_more_to_the_fallback(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    sections = {**FALLBACK, "admission": {"max_queued_requests": 1}}
    async with (
        ScriptedBackend(SPARE) as spare,
        running(backend, spare, sections=sections, per_backend={"max_in_flight": 1}) as under_test,
    ):
        spare.plays(*json(named("spare")))
        asked = [asyncio.create_task(under_test.ask(chat())) for _ in range(2)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "one runs, one waits")
        answer = await under_test.ask(chat())
        assert (answer.status, answer.header("x-gateway-fallback-from")) == (200, MODEL)
        assert (await under_test.ask(chat(), b"x-gateway-fallback: none")).status == 429
        assert list(under_test.gateway.core.metrics.fallbacks.values) == [(MODEL, SPARE, "queue_full")]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_fallback_that_cannot_chat_leaves_the_first_error(backend: ScriptedBackend) -> None:
    async with ScriptedBackend(SPARE) as spare, running(backend, spare, sections=FALLBACK) as under_test:
        spare.plays(*json({"detail": "Not Found"}, 404))
        await backend.stop()
        answer = await under_test.ask(chat())
        assert answer.status in (502, 503)
        assert b"spare" not in answer.body


async def test_a_stream_that_breaks_is_not_continued_by_another_model(backend: ScriptedBackend) -> None:
    backend.plays(*events(["a"], 1)[:2], fin())
    async with ScriptedBackend(SPARE) as spare, running(backend, spare, sections=FALLBACK) as under_test:
        answer = await under_test.ask(chat(stream=True))
        assert b"stream_interrupted" in answer.body
        assert spare.ledger == []


async def test_an_isolated_key_stays_isolated_in_the_other_model(backend: ScriptedBackend) -> None:
    keys = [{"name": "ann", "key": "sk-ann", "isolate_cache": True}]
    async with (
        ScriptedBackend(SPARE) as spare,
        running(backend, spare, sections={**FALLBACK, "auth": {"keys": keys}}) as under_test,
    ):
        bearer = b"authorization: Bearer sk-ann"
        assert (await under_test.ask(chat(), bearer)).status == 200
        await backend.stop()
        assert (await under_test.ask(chat(), bearer)).status == 200
        own, other = (orjson.loads(each.ledger[0].body) for each in (backend, spare))
        assert own["cache_salt"] == other["cache_salt"]


async def test_a_key_that_may_not_use_the_fallback_waits_for_its_own_model(backend: ScriptedBackend) -> None:
    keys = [
        {"name": "ann", "key": "sk-ann", "models": ["gpt-4o"]},
        {"name": "bob", "key": "sk-bob", "models": ["gpt-4o", SPARE]},
    ]
    async with (
        ScriptedBackend(SPARE) as spare,
        running(backend, spare, sections={**FALLBACK, "auth": {"keys": keys}}) as under_test,
    ):
        ann, bob = (b"authorization: Bearer sk-%b" % name for name in (b"ann", b"bob"))
        await backend.stop()
        waits = asyncio.create_task(under_test.ask(chat(model="gpt-4o"), ann))
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "it waits")
        assert (await under_test.ask(chat(model="gpt-4o"), bob)).header("x-gateway-model") == SPARE
        await backend.start()
        assert (await waits).header("x-gateway-model") == MODEL
        assert len(spare.ledger) == 1


async def test_an_adapter_is_served_where_it_is_loaded(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    cards = [{"id": MODEL, "object": "model"}, {"id": "poet", "object": "model", "parent": MODEL}]
    report = 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="%s",waiting_lora_adapters=""} 1.7e9\n'
    for each, running_adapters in ((backend, ""), (other, "poet")):
        page = 'vllm:num_requests_running{engine="0"} 0\n' + report % running_adapters
        each.control[b"/v1/models"] = raw(whole(200, orjson.dumps({"data": cards})))
        each.control[b"/metrics"] = raw(whole(200, page.encode(), kind=b"text/plain"))
        each.plays(*json(named("x")))
    async with running(backend, other, sections={"routing": {"policy": "prefix"}}) as under_test:
        slots = under_test.backend(other).engines[0]
        await holds(lambda: slots.adapters is not None and slots.adapters.loaded == ["poet"], "its report was read")
        for number in range(4):
            assert (await under_test.ask(chat(f"{number}", model="poet"))).status == 200
        assert (len(backend.ledger), len(other.ledger)) == (0, 4)
