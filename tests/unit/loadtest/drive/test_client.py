"""One request against a server that answers in every way there is."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import orjson
import pytest

from loadtest.access import Access
from loadtest.drive.client import Client, open_session
from loadtest.drive.plan import Plan
from loadtest.drive.record import CONNECTION, ERROR_OBJECT, NOTHING, OTHER_ANSWER, SILENT_END, Record
from loadtest.workloads.prompts import Endpoint, Prompt
from tests.unit.loadtest.drive.recorded import (
    DONE,
    END,
    HEAD,
    REFUSED,
    WORD,
    Answer,
    RecordedServer,
    Recording,
    chunk,
    event,
    seconds_from_now,
    stream,
    usage,
    whole,
)

pytestmark = pytest.mark.virtual_time

_DIED = HEAD + chunk(event({"error": {"message": "engine died", "code": 500}}))
_HALF = HEAD + chunk(event(WORD))
_SAID = {"choices": [{"text": "word " * 5}], "usage": usage(5)["usage"]}


def _plan(url: str = "", **more: Any) -> Plan:
    return Plan.model_validate({"url": url, "model": "m", "concurrency": 1, "requests": 1, **more})


async def _send(plan: Plan) -> Record:
    record = Record(index=0, group=0, intended=0.0, sent=0.0, end=0.0, outcome="")
    clock = seconds_from_now()
    async with open_session(plan, clock) as session:
        client = Client(plan, session, clock)
        await client.send(record, plan.body_maker().body(Prompt(0, prefix="shared", tail="own", max_tokens=5)))
    return record


async def _asked(answer: Answer, plan: Plan) -> tuple[Record, RecordedServer]:
    async with RecordedServer(answer) as server:
        return await _send(plan.model_copy(update={"url": server.url})), server


async def test_a_whole_stream_yields_times_tokens_and_the_gateways_headers() -> None:
    record, server = await _asked(lambda _: stream(0.5, 0.625, 0.75, 0.875, 1.5), _plan())
    assert record.ok
    assert (record.sent, record.first_token, record.end) == pytest.approx((0, 0.5, 1.5))
    assert record.tpot_seconds == pytest.approx(0.25)
    assert (record.quiet_from, record.quiet_until) == pytest.approx((0.875, 1.5))
    assert (record.completion_tokens, record.prompt_tokens, record.cached_tokens) == (5, 100, 64)
    assert (record.backend, record.predicted_tokens, record.queue_seconds) == ("gpu-a", 48, 0.0025)
    assert (record.events, record.reads) == (5, 5)
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_an_unstreamed_answer_has_tokens_but_no_first_token() -> None:
    record, server = await _asked(lambda _: whole(_SAID, at=0.25), _plan(stream=False))
    assert record.ok
    assert record.first_token is None
    assert record.end == pytest.approx(0.25)
    assert record.completion_tokens == 5
    assert "stream" not in server.bodies[0]


async def test_embeddings_send_an_input_and_no_generation_fields() -> None:
    answer = whole({"data": [{"embedding": [0.0]}], "usage": {"prompt_tokens": 2, "total_tokens": 2}})
    record, server = await _asked(lambda _: answer, _plan(endpoint=Endpoint.EMBEDDINGS, stream=False, cache_salt="s"))
    assert record.ok
    assert server.bodies[0] == {"model": "m", "input": "sharedown", "cache_salt": "s"}


@pytest.mark.parametrize(
    ("answer", "outcome", "reported", "shown_as"),
    [
        (REFUSED, "http_429", "queue full", ERROR_OBJECT),
        (whole("<h1>Bad Gateway</h1>", status=502), "http_502", "<h1>Bad Gateway", OTHER_ANSWER),
        (Recording([(0, _DIED + END)]), "stream_error_event", "engine died", ERROR_OBJECT),
        (Recording([(0, _DIED)], breaks=True), "stream_error_event", "engine died", ERROR_OBJECT),
        (Recording([(0, _HALF + END)]), "stream_without_done", "1 events", SILENT_END),
        (Recording([(0, _HALF)], breaks=True), "stream_without_done", "ServerDisconnected", CONNECTION),
        (Recording([], breaks=True), "disconnected", "ServerDisconnected", CONNECTION),
        (whole(_SAID), "not_a_stream", "application/json", OTHER_ANSWER),
    ],
)
async def test_what_goes_wrong_with_a_stream_is_reported_by_kind(
    answer: Recording, outcome: str, reported: str, shown_as: str
) -> None:
    record, _ = await _asked(lambda _: answer, _plan())
    assert record.outcome == outcome
    assert reported in (record.detail or "")
    assert record.shown_as == shown_as


async def test_an_answer_of_another_shape_is_not_a_success() -> None:
    record, _ = await _asked(lambda _: whole({"hello": "world"}), _plan(stream=False))
    assert (record.outcome, record.shown_as) == ("bad_body", OTHER_ANSWER)


async def test_an_answer_that_breaks_its_own_schema_fails_alone_and_not_the_run() -> None:
    record, _ = await _asked(lambda _: whole(_SAID | {"usage": "plenty"}), _plan(stream=False))
    assert (record.outcome, record.shown_as) == ("bad_body", OTHER_ANSWER)
    assert "AttributeError" in (record.detail or "")


async def test_a_header_that_is_not_text_can_still_be_written_down() -> None:
    body = b'{"choices": [{"text": "word"}]}'
    head = b"HTTP/1.1 200 OK\r\nx-gateway-backend: gpu-\xff\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    record, _ = await _asked(lambda _: Recording([(0, head + body)]), _plan(stream=False))
    assert record.ok
    assert orjson.loads(orjson.dumps(asdict(record)))["backend"] == "gpu-?"


async def test_a_server_that_is_not_there_is_a_result() -> None:
    assert (await _send(_plan("http://127.0.0.1:1"))).outcome == "connect"


async def test_an_answer_that_takes_too_long_is_a_timeout() -> None:
    record, _ = await _asked(lambda _: None, _plan(timeout_seconds=600))
    assert (record.outcome, record.shown_as) == ("timeout", NOTHING)
    assert record.end - record.sent == pytest.approx(600)


async def test_a_stream_that_stops_is_a_timeout_with_the_times_of_what_came() -> None:
    record, _ = await _asked(
        lambda _: Recording([(2.0, _HALF), (700.0, chunk(DONE) + END)]), _plan(timeout_seconds=600)
    )
    assert record.outcome == "timeout"
    assert (record.first_token, record.end) == pytest.approx((2, 600))


async def test_a_cancelled_request_is_recorded_as_interrupted() -> None:
    async with RecordedServer(lambda _: None) as server:
        plan, clock = _plan(server.url), seconds_from_now()
        record = Record(index=0, group=0, intended=0.0, sent=0.0, end=0.0, outcome="")
        async with open_session(plan, clock) as session:
            client = Client(plan, session, clock)
            sending = asyncio.create_task(
                client.send(record, plan.body_maker().body(Prompt(0, prefix="", tail="x", max_tokens=1)))
            )
            await asyncio.sleep(5)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
    assert (record.outcome, record.end) == ("interrupted", pytest.approx(5))


async def test_the_api_key_is_sent_and_never_part_of_what_is_recorded() -> None:
    plan = _plan(access=Access.of("sk-secret", ["X-Team: s3cret"]))
    _, server = await _asked(lambda _: stream(0.5), plan)
    assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
    assert server.asked[0].headers["x-team"] == "s3cret"
    assert not any(secret in plan.model_dump_json() + repr(plan) for secret in ("sk-secret", "s3cret"))
