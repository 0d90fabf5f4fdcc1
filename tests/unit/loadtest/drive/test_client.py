"""One request against a server that answers in every way there is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import orjson
import pytest

from loadtest.access import Access
from loadtest.drive.client import Client, open_session
from loadtest.drive.plan import Plan
from loadtest.drive.record import CONNECTION, ERROR_OBJECT, NOTHING, OTHER_ANSWER, SILENT_END, Record
from loadtest.workloads.prompts import Endpoint, Prompt

pytestmark = pytest.mark.flaky(reruns=2)  # clocks of a shared machine: what holds, holds in one of three tries


def _plan(url: str, **more: Any) -> Plan:
    return Plan.model_validate({"url": url, "model": "m", "concurrency": 1, "requests": 1, **more})


async def _send(plan: Plan) -> Record:
    record = Record(index=0, group=0, intended=0.0, sent=0.0, end=0.0, outcome="")
    async with open_session(plan) as session:
        client = Client(plan, session, time.monotonic)
        await client.send(record, plan.body_maker().body(Prompt(0, "shared", "own", 5)))
    return record


async def test_a_whole_stream_yields_times_tokens_and_the_gateways_headers(fake: Any) -> None:
    record = await _send(_plan(fake.url))
    assert record.ok
    assert record.first_token is not None
    assert record.sent <= record.first_token <= record.end
    assert (record.completion_tokens, record.prompt_tokens, record.cached_tokens) == (5, 100, 64)
    assert (record.backend, record.predicted_tokens, record.queue_seconds) == ("gpu-a", 48, 0.0025)
    assert record.events == 5
    assert fake.bodies[0]["stream_options"] == {"include_usage": True}


async def test_an_unstreamed_answer_has_tokens_but_no_first_token(fake: Any) -> None:
    record = await _send(_plan(fake.url, stream=False))
    assert record.ok
    assert record.first_token is None
    assert record.completion_tokens == 5
    assert "stream" not in fake.bodies[0]


async def test_embeddings_send_an_input_and_no_generation_fields(fake: Any) -> None:
    record = await _send(_plan(fake.url, endpoint=Endpoint.EMBEDDINGS, stream=False, cache_salt="s"))
    assert record.ok
    assert fake.bodies[0] == {"model": "m", "input": "sharedown", "cache_salt": "s"}


@pytest.mark.parametrize(
    ("act", "outcome", "reported", "shown_as"),
    [
        ("refused", "http_429", "queue full", ERROR_OBJECT),
        ("refused_otherwise", "http_502", "<h1>Bad Gateway", OTHER_ANSWER),
        ("error", "stream_error_event", "engine died", ERROR_OBJECT),
        ("error_and_broken", "stream_error_event", "engine died", ERROR_OBJECT),
        ("cut", "stream_without_done", "1 events", SILENT_END),
        ("broken", "stream_without_done", "ServerDisconnected", CONNECTION),
        ("dropped", "disconnected", "ServerDisconnected", CONNECTION),
        ("whole", "not_a_stream", "application/json", OTHER_ANSWER),
    ],
)
async def test_what_goes_wrong_with_a_stream_is_reported_by_kind(
    fake: Any, act: str, outcome: str, reported: str, shown_as: str
) -> None:
    record = await _send(_plan(fake.url, extra_body={"act": act}))
    assert record.outcome == outcome
    assert reported in (record.detail or "")
    assert record.shown_as == shown_as


async def test_an_answer_of_another_shape_is_not_a_success(fake: Any) -> None:
    record = await _send(_plan(fake.url, stream=False, extra_body={"act": "nonsense"}))
    assert (record.outcome, record.shown_as) == ("bad_body", OTHER_ANSWER)


async def test_an_answer_that_breaks_its_own_schema_fails_alone_and_not_the_run(fake: Any) -> None:
    record = await _send(_plan(fake.url, stream=False, extra_body={"act": "odd_usage"}))
    assert (record.outcome, record.shown_as) == ("bad_body", OTHER_ANSWER)
    assert "AttributeError" in (record.detail or "")


async def test_a_header_that_is_not_text_can_still_be_written_down() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"choices": [{"text": "word"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nx-gateway-backend: gpu-\xff\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        record = await _send(_plan(f"http://{host}:{port}", stream=False))
    assert record.ok
    assert orjson.loads(orjson.dumps(asdict(record)))["backend"] == "gpu-?"


async def test_a_server_that_is_not_there_is_a_result() -> None:
    assert (await _send(_plan("http://127.0.0.1:1"))).outcome == "connect"


async def test_an_answer_that_takes_too_long_is_a_timeout(fake: Any) -> None:
    record = await _send(_plan(fake.url, timeout_seconds=0.05, extra_body={"act": "held"}))
    assert (record.outcome, record.shown_as) == ("timeout", NOTHING)
    assert record.end - record.sent >= 0.05


async def test_a_cancelled_request_is_recorded_as_interrupted(fake: Any) -> None:
    plan = _plan(fake.url, extra_body={"act": "held"})
    record = Record(index=0, group=0, intended=0.0, sent=0.0, end=0.0, outcome="")
    async with open_session(plan) as session:
        client = Client(plan, session, time.monotonic)
        sending = asyncio.create_task(client.send(record, plan.body_maker().body(Prompt(0, "", "x", 1))))
        async with asyncio.timeout(5):
            while not fake.open_requests:
                await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert record.outcome == "interrupted"


async def test_the_api_key_is_sent_and_never_part_of_what_is_recorded(fake: Any) -> None:
    plan = _plan(fake.url, access=Access.of("sk-secret", ["X-Team: s3cret"]))
    await _send(plan)
    assert fake.headers[0]["Authorization"] == "Bearer sk-secret"
    assert fake.headers[0]["x-team"] == "s3cret"
    assert not any(secret in plan.model_dump_json() + repr(plan) for secret in ("sk-secret", "s3cret"))
