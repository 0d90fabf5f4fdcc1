"""A stream that waits is kept alive by comments, which real SDKs read over, and ends like any other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import orjson
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.clients import Answer, chat
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import Step, fin, head, json_answer, raw, stream, until, whole

STREAM = chat(stream=True)
OFTEN = {"admission": {"comment_seconds": 0.05, "max_wait_seconds": 30.0}}
WAITING = b": waiting\n\n"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello."}]


@asynccontextmanager
async def one_slot(backend: ScriptedBackend, **admission: object) -> AsyncIterator[tuple[UnderTest, asyncio.Event]]:
    """A gateway whose only slot is taken until the event."""
    go = asyncio.Event()
    backend.plays_once(until(go), *json_answer())
    sections = {"admission": {**OFTEN["admission"], **admission}}
    async with running(backend, sections=sections, per_backend={"max_in_flight": 1}) as under_test:
        first = asyncio.create_task(under_test.ask())
        await holds(lambda: len(backend.ledger) == 1, "the slot is taken")
        yield under_test, go
        go.set()
        assert (await first).status == 200


async def waited(under_test: UnderTest, body: bytes, go: asyncio.Event) -> Answer:
    """The answer to a request that waits for a while until the slot comes free."""
    asked = asyncio.create_task(under_test.ask(body))
    await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "it waits")
    await asyncio.sleep(0.3)
    go.set()
    return await asked


async def test_a_waiting_stream_gets_comments_and_then_its_answer(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3))
    async with one_slot(backend) as (under_test, go):
        answer = await waited(under_test, STREAM, go)
        assert answer.status == 200
        assert answer.complete
        assert answer.body.startswith(WAITING * 2)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"


async def test_a_waiting_plain_request_gets_nothing_but_its_answer(backend: ScriptedBackend) -> None:
    async with one_slot(backend) as (under_test, go):
        answer = await waited(under_test, chat(), go)
        assert answer.json["choices"]
        assert answer.header("x-gateway-backend")


async def test_comments_can_be_switched_off(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3))
    async with one_slot(backend, comment_seconds=0) as (under_test, go):
        answer = await waited(under_test, STREAM, go)
        assert b": waiting" not in answer.body
        assert answer.header("x-gateway-backend")


@pytest.mark.parametrize("body", [b'{"error":{"message":"too long","code":400}}', b"no JSON"])
async def test_what_the_backend_refuses_then_is_the_last_event(backend: ScriptedBackend, body: bytes) -> None:
    backend.plays(raw(whole(400, body)))
    async with one_slot(backend) as (under_test, go):
        answer = await waited(under_test, STREAM, go)
        assert answer.status == 200
        assert not answer.complete
        error = orjson.loads(answer.events[-1].rpartition(b"data: ")[2])["error"]
        assert "too long" in error["message"] or "returned 400" in error["message"]
    assert under_test.outcomes == {"completed": 1, "refused_by_backend": 1}


async def test_a_try_that_fails_before_anything_of_an_answer_came_is_still_repeated(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    go = asyncio.Event()
    for each in (backend, other):
        each.plays_once(until(go), *json_answer())
        each.plays(*stream(3))
    backend.plays_once(fin())
    async with running(backend, other, sections=OFTEN, per_backend={"max_in_flight": 1}) as under_test:
        first = [asyncio.create_task(under_test.ask()) for _ in range(2)]
        await holds(lambda: under_test.in_flight == 2, "both slots are taken")
        asked = [asyncio.create_task(under_test.ask(STREAM)) for _ in range(2)]
        await asyncio.sleep(0.2)
        go.set()
        for answer in await asyncio.gather(*asked):
            assert answer.body.startswith(WAITING)
            assert answer.complete
        assert {answer.status for answer in await asyncio.gather(*first)} == {200}
        assert len(backend.ledger) + len(other.ledger) == 5


async def test_a_wait_that_is_too_long_ends_with_an_error_event(backend: ScriptedBackend) -> None:
    async with one_slot(backend, max_wait_seconds=0.3) as (under_test, _):
        answer = await under_test.ask(STREAM)
        assert answer.status == 200
        assert b'"code":"queue_timeout"' in answer.body
        assert not answer.complete


@pytest.mark.parametrize("before", [[], [head(200)]], ids=["no head", "head"])
async def test_a_stream_whose_first_token_takes_long_gets_comments_too(
    backend: ScriptedBackend, before: list[Step]
) -> None:
    go = asyncio.Event()
    backend.plays(*before, until(go), *stream(3)[len(before) :])
    async with running(backend, sections={"admission": {"comment_seconds": 1}}) as under_test:
        asked = asyncio.create_task(under_test.ask(STREAM))
        await asyncio.sleep(2.5)
        go.set()
        answer = await asked
        assert answer.body.startswith(WAITING)
        assert answer.complete
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_while_it_gets_comments_leaves_nothing(backend: ScriptedBackend) -> None:
    async with one_slot(backend) as (under_test, _):
        asked = asyncio.create_task(under_test.ask(STREAM))
        await asyncio.sleep(0.2)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 0, "it has left the line")


@asynccontextmanager
async def sdk_of(under_test: UnderTest) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client, which tries once."""
    url = f"http://127.0.0.1:{under_test.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as sdk:
        yield sdk


async def test_openais_sdk_reads_over_comments(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3))
    async with one_slot(backend) as (under_test, go), sdk_of(under_test) as sdk:
        events = await sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        assert under_test.gateway.core.lease_broker.waiting == 1  # its head came with the first comment
        await asyncio.sleep(0.2)
        go.set()
        text = [event.choices[0].delta.content async for event in events if event.choices]
        assert "".join(piece or "" for piece in text) == "t0 t1 t2 "


async def test_openais_sdk_raises_what_the_last_event_says(backend: ScriptedBackend) -> None:
    async with one_slot(backend, max_wait_seconds=0.3) as (under_test, _), sdk_of(under_test) as sdk:
        events = await sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="had free capacity within") as raised:
            await anext(aiter(events))
        assert raised.value.code == "queue_timeout"
