"""Stored responses: read, followed and cancelled by the client that made them, and by nobody else."""

import asyncio
from typing import Any

import orjson
import pytest

from gateway.features.responses.feature import ResponsesFeature
from tests.clients import request
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import answer, chunk, head, last_chunk, until

RESPONSES, RESPONSE = b"/v1/responses", b"/v1/responses/resp_1"
BACKGROUND = orjson.dumps({"model": "scripted", "input": "x", "background": True, "stream": True})
CREATED = b'event: response.created\ndata: {"response":{"id":"resp_1","status":"in_progress"}}\n\n'
COMPLETED = b'event: response.completed\ndata: {"response":{"id":"resp_1","status":"completed"}}\n\n'
PLAIN = orjson.dumps({"model": "scripted", "input": "x", "background": True})
QUEUED = {"id": "resp_1", "object": "response", "status": "queued"}
FINISHED = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "usage": {"input_tokens": 5, "output_tokens": 7},
}
STORED = {"id": "resp_1", "object": "response", "status": "in_progress"}
KEYS = [{"name": name, "key": f"sk-{name}"} for name in ("ann", "bob")]
ANN, BOB = b"authorization: Bearer sk-ann", b"authorization: Bearer sk-bob"


async def test_a_response_in_the_background_is_read_and_cancelled_while_it_streams(backend: ScriptedBackend) -> None:
    ended = asyncio.Event()
    backend.plays(head(200), chunk(CREATED), until(ended), chunk(COMPLETED), last_chunk())
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(request(BACKGROUND, target=RESPONSES))
        await holds(lambda: len(backend.ledger) == 1, "the response is being made")
        assert CREATED in await client.read()
        for method, target in ((b"GET", RESPONSE), (b"POST", RESPONSE + b"/cancel")):
            backend.plays(answer(200, STORED))
            assert (await under_test.ask(b"", method=method, target=target)).status == 200
            assert backend.ledger[-1].target == target
        backend.plays(answer(200, FINISHED))
        ended.set()


async def test_it_is_read_and_cancelled_after_its_client_has_left(backend: ScriptedBackend) -> None:
    backend.plays(head(200), chunk(CREATED), until(asyncio.Event()))
    async with running(backend) as under_test:
        async with await under_test.client() as client:
            await client.send(request(BACKGROUND, target=RESPONSES))
            assert CREATED in await client.read()
            client.reset()
        await holds(lambda: under_test.outcomes.get("client_gone") == 1, "the client has left")
        for method, target in ((b"GET", RESPONSE), (b"POST", RESPONSE + b"/cancel")):
            backend.plays(answer(200, STORED))
            assert (await under_test.ask(b"", method=method, target=target)).status == 200
        backend.plays(answer(200, FINISHED))


async def test_it_is_followed_as_a_stream_from_an_event_on(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays(answer(200, STORED))
        await under_test.ask(BACKGROUND, target=RESPONSES)
        backend.plays(head(200), chunk(CREATED), chunk(COMPLETED), last_chunk())
        query = b"?stream=true&api_key=x&starting_after=7"
        followed = await under_test.ask(b"", method=b"GET", target=RESPONSE + query)
        assert followed.header("content-type") == "text/event-stream"
        assert followed.body == CREATED + COMPLETED
        assert backend.ledger[-1].target == RESPONSE + b"?stream=true&starting_after=7"


@pytest.mark.parametrize(
    ("sections", "ann", "bob"),
    [
        ({"auth": {"keys": KEYS}}, (ANN,), (BOB,)),
        ({"admission": {"tenant_header": "x-user"}}, (b"x-user: ann",), (b"x-user: bob",)),
        ({"auth": {"keys": KEYS}, "admission": {"tenant_header": "x-user"}}, (ANN, b"x-user: a"), (ANN, b"x-user: b")),
    ],
    ids=["keys", "tenants", "tenants of a key"],
)
async def test_nobody_takes_over_the_response_of_another_client(
    backend: ScriptedBackend, sections: dict[str, dict[str, Any]], ann: tuple[bytes, ...], bob: tuple[bytes, ...]
) -> None:
    async with running(backend, sections=sections) as under_test:
        backend.plays(answer(200, STORED))
        made = orjson.dumps({"model": "scripted", "input": "x"})
        assert (await under_test.ask(made, *ann, target=RESPONSES)).status == 200
        takeover = orjson.dumps({"model": "scripted", "input": "x", "request_id": "resp_1", "store": False})
        assert (await under_test.ask(takeover, *bob, target=RESPONSES)).status == 400
        backend.plays(answer(200, STORED))  # an engine that gives one id twice
        assert (await under_test.ask(made, *bob, target=RESPONSES)).status == 200
        continued = orjson.dumps({"model": "scripted", "input": "x", "previous_response_id": "resp_1"})
        before = len(backend.ledger)
        assert (await under_test.ask(b"", *bob, method=b"GET", target=RESPONSE)).status == 404
        assert (await under_test.ask(continued, *bob, target=RESPONSES)).status == 400
        assert len(backend.ledger) == before
        backend.plays(answer(200, STORED))
        assert (await under_test.ask(b"", *ann, method=b"GET", target=RESPONSE)).status == 200


async def test_a_response_in_the_background_holds_its_slot_until_it_is_completed(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays(answer(200, QUEUED))
        asked = await under_test.ask(PLAIN, target=RESPONSES)
        assert asked.json == QUEUED
        backend.plays_once(answer(200, QUEUED))
        backend.plays(answer(200, FINISHED))
        await holds(lambda: len(backend.ledger) == 2, "the gateway has asked for its status")
        assert (backend.ledger[1].method, backend.ledger[1].target) == (b"GET", RESPONSE)
        assert under_test.in_flight == 1
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert len(backend.ledger) == 3


async def test_another_request_waits_for_its_slot(backend: ScriptedBackend) -> None:
    async with running(backend, per_backend={"max_in_flight": 1}) as under_test:
        backend.plays(answer(200, QUEUED))
        await under_test.ask(PLAIN, target=RESPONSES)
        backend.plays(answer(200, FINISHED))
        assert (await under_test.ask()).status == 200  # whatever it is answered
        assert [seen.target for seen in backend.ledger] == [RESPONSES, RESPONSE, b"/v1/chat/completions"]


async def test_a_cancelled_response_gives_its_slot_back_at_once(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays(answer(200, QUEUED))
        await under_test.ask(PLAIN, target=RESPONSES)
        backend.plays(answer(200, {**STORED, "status": "cancelled"}))
        await under_test.ask(b"", target=RESPONSE + b"/cancel")
        assert await holds(lambda: under_test.in_flight == 0, "the slot is free") < 0.4
        assert [seen.target for seen in backend.ledger[1:]] == [RESPONSE + b"/cancel", RESPONSE]


async def test_a_stream_in_the_background_holds_its_slot_after_its_client_has_left(backend: ScriptedBackend) -> None:
    backend.plays(head(200), chunk(CREATED), until(asyncio.Event()))
    async with running(backend) as under_test:
        async with await under_test.client() as client:
            await client.send(request(BACKGROUND, target=RESPONSES))
            assert CREATED in await client.read()
            client.reset()
        await holds(lambda: under_test.outcomes.get("client_gone") == 1, "the client has left")
        assert under_test.in_flight == 1
        backend.plays(answer(200, FINISHED))
        await holds(lambda: under_test.in_flight == 0, "the slot is free")


async def test_a_stream_that_its_client_reads_to_its_end_asks_nothing(backend: ScriptedBackend) -> None:
    backend.plays(head(200), chunk(CREATED), chunk(COMPLETED), last_chunk())
    async with running(backend) as under_test:
        assert (await under_test.ask(BACKGROUND, target=RESPONSES)).complete
        assert under_test.in_flight == 0
        assert len(backend.ledger) == 1


async def test_the_loss_of_its_engine_gives_the_slot_back(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays(answer(200, QUEUED))
        await under_test.ask(PLAIN, target=RESPONSES)
        assert under_test.in_flight == 1
        await backend.stop()
        await holds(lambda: under_test.in_flight == 0, "the slot is free")


async def test_an_engine_that_never_ends_it_gets_the_slot_back_at_the_limit(backend: ScriptedBackend) -> None:
    limit = {"upstream": {"background_timeout_seconds": 1.2}}
    async with running(backend, sections=limit) as under_test:
        backend.plays(answer(200, QUEUED))
        await under_test.ask(PLAIN, target=RESPONSES)
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert [event["event"] for event in under_test.events if "background" in event["event"]] == [
            "background_response_too_long"
        ]


async def test_a_response_that_its_engine_does_not_know_any_more_is_over(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays(answer(200, QUEUED))
        await under_test.ask(PLAIN, target=RESPONSES)
        backend.plays(answer(404, {"error": {"message": "Response with id 'resp_1' not found."}}))
        await holds(lambda: under_test.in_flight == 0, "the slot is free")


async def test_a_refused_background_request_holds_nothing(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays(answer(400, {"error": {"message": "VLLM_ENABLE_RESPONSES_API_STORE=1 is needed."}}))
        assert (await under_test.ask(PLAIN, target=RESPONSES)).status == 400
        assert under_test.in_flight == 0


async def test_a_gateway_that_stops_does_not_wait_for_it(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        backend.plays(answer(200, QUEUED))
        await under_test.ask(PLAIN, target=RESPONSES)
        assert under_test.in_flight == 1
        await under_test.gateway.feature(ResponsesFeature).background.stop()
        assert under_test.in_flight == 0


async def test_it_counts_as_a_concurrent_request_of_its_key(backend: ScriptedBackend) -> None:
    keys = {"auth": {"keys": [{"name": "ann", "key": "sk-ann", "max_concurrent_requests": 1}]}}
    async with running(backend, sections=keys) as under_test:
        backend.plays(answer(200, QUEUED))
        assert (await under_test.ask(PLAIN, ANN, target=RESPONSES)).status == 200
        assert (await under_test.ask(None, ANN)).error["code"] == "rate_limit_exceeded"
        backend.plays(answer(200, FINISHED))
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert (await under_test.ask(None, ANN)).status == 200
