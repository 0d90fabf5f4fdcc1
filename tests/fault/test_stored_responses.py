"""Stored responses: read, followed and cancelled by the client that made them, and by nobody else."""

import asyncio
from typing import Any

import orjson
import pytest

from tests.clients import request
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import answer, chunk, head, last_chunk, until

RESPONSES, RESPONSE = b"/v1/responses", b"/v1/responses/resp_1"
BACKGROUND = orjson.dumps({"model": "scripted", "input": "x", "background": True, "stream": True})
CREATED = b'event: response.created\ndata: {"response":{"id":"resp_1","status":"in_progress"}}\n\n'
COMPLETED = b'event: response.completed\ndata: {"response":{"id":"resp_1","status":"completed"}}\n\n'
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
        assert (await under_test.ask(continued, *bob, target=RESPONSES)).status == 404
        assert len(backend.ledger) == before
        backend.plays(answer(200, STORED))
        assert (await under_test.ask(b"", *ann, method=b"GET", target=RESPONSE)).status == 200
