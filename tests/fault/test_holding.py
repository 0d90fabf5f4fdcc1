"""While no backend can serve, requests wait within their limits, and are served when one is back."""

import asyncio

import pytest

from tests.clients import Answer, Client, chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import hang, json_answer, raw, stream, tokens, whole

STREAM = chat(stream=True)


def crowd(under_test: UnderTest, count: int) -> list["asyncio.Task[Answer]"]:
    """Plain requests and streams in turn."""
    bodies = [chat(), STREAM]
    return [asyncio.create_task(under_test.ask(bodies[number % 2])) for number in range(count)]


async def gone(under_test: UnderTest) -> None:
    await holds(lambda: not under_test.gateway.core.fleet.ready, "nobody can serve")


async def test_while_all_backends_restart_no_request_fails(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    for each in (backend, other):
        each.plays(*stream(3))
    async with running(backend, other) as under_test:
        for each in (backend, other):
            await each.stop()
        asked = crowd(under_test, 20)
        await gone(under_test)
        asked += crowd(under_test, 20)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 40, "all wait")
        assert (await under_test.ask(method=b"GET", target=b"/readyz")).status == 503
        leaving = asked[::4]
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 30, "some have left")
        await other.start()
        answers = await asyncio.gather(*(task for task in asked if task not in leaving))
        assert [answer.status for answer in answers] == [200] * 30
        assert len(other.ledger) == 30
        await holds(lambda: under_test.outcomes.get("client_gone") == 10, "each has an outcome")
        assert under_test.outcomes["completed"] == 30


async def test_a_request_is_held_whose_backend_dies_before_it_answers(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with running(backend) as under_test:
        asked = crowd(under_test, 6)
        await holds(lambda: len(backend.ledger) == 6, "all run there")
        await backend.stop()
        await gone(under_test)
        backend.plays(*stream(3))
        await backend.start()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 6


async def test_requests_in_line_for_a_backend_that_dies_are_held(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with running(backend, per_backend={"max_in_flight": 1}) as under_test:
        first = asyncio.create_task(under_test.ask(STREAM))
        await holds(lambda: len(backend.ledger) == 1, "the first one runs")
        asked = crowd(under_test, 5)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 5, "five wait")
        backend.plays(*json_answer())
        await backend.stop()
        await gone(under_test)
        await backend.start()
        assert [answer.status for answer in await asyncio.gather(first, *asked)] == [200] * 6


async def test_a_gateway_that_starts_before_its_backends_holds_what_comes() -> None:
    backend = ScriptedBackend()
    async with backend:
        pass  # it has a port now, and nobody listens there
    async with running(backend, wait=False) as under_test:
        asked = crowd(under_test, 4)
        unknown = asyncio.create_task(under_test.ask(chat(model="no-such-model")))
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 5, "all wait: no model is known yet")
        async with backend:
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 4
            assert (await unknown).error["code"] == "model_not_found"
            assert (await under_test.ask(chat(model="no-such-model"))).status == 404
            await under_test.comes_to_rest()


async def test_a_backend_that_never_comes_back_is_told_with_503_after_the_longest_wait(
    backend: ScriptedBackend,
) -> None:
    async with running(backend, sections={"admission": {"max_wait_seconds": 1.0}}) as under_test:
        await backend.stop()
        started = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*crowd(under_test, 6))
        took = asyncio.get_running_loop().time() - started
        assert took >= 1.0
        for answer in answers:
            assert (answer.status, answer.error["code"]) == (503, "no_backend_available")
            assert int(answer.header("retry-after-ms") or 0) >= 1
            assert answer.error["message"].endswith(": connection refused.")
        assert under_test.outcomes == {"no_backend": 6}


async def test_what_is_held_is_bounded_like_the_line(backend: ScriptedBackend) -> None:
    sections = {"admission": {"max_queued_requests": 3, "max_wait_seconds": 1.0}}
    async with running(backend, sections=sections) as under_test:
        await backend.stop()
        await under_test.ask(method=b"GET", target=b"/v1/models")
        await gone(under_test)
        asked = crowd(under_test, 3)
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 3, "three wait")
        refused = await under_test.ask()
        assert (refused.status, refused.error["code"]) == (503, "no_backend_available")
        assert {answer.status for answer in await asyncio.gather(*asked)} == {503}


async def test_a_look_up_waits_for_the_backend_that_stores_its_response(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(raw(whole(200, b'{"id":"resp_1","object":"response"}')))
    async with running(backend, other) as under_test:
        assert (await under_test.ask(target=b"/v1/responses")).status == 200
        [place] = [each for each in (backend, other) if each.ledger]
        await place.stop()
        await holds(lambda: under_test.state(place) == "down", "it is out")
        look_up = asyncio.create_task(under_test.ask(method=b"GET", target=b"/v1/responses/resp_1"))
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "it waits")
        assert (await under_test.ask()).status == 200  # the other backend serves the others
        await place.start()
        assert (await look_up).status == 200
        assert place.ledger[-1].target == b"/v1/responses/resp_1"


# Nothing else ends the wait while a test lasts.
ENDING = {"server": {"drain_timeout_seconds": 0.2}, "admission": {"max_wait_seconds": 600}}


@pytest.mark.parametrize("body", [chat(), STREAM], ids=["plain", "stream"])
async def test_what_is_held_when_the_gateway_stops_gets_503_with_the_drain(
    backend: ScriptedBackend, body: bytes
) -> None:
    async with running(backend, sections=ENDING) as under_test:
        await backend.stop()
        async with await Client.connect(under_test.port) as client:
            await client.send(request(body))
            await holds(lambda: under_test.gateway.core.lease_broker.waiting == 1, "it waits")
            await under_test.gateway.server.drain()
            await under_test.gateway.server._cut()
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (503, "shutting_down")


async def test_a_stream_that_has_begun_is_not_held(backend: ScriptedBackend) -> None:
    backend.plays(*tokens(1), hang())
    async with running(backend) as under_test:
        asked = asyncio.create_task(under_test.ask(STREAM))
        await holds(lambda: under_test.in_flight == 1 and len(backend.ledger) == 1, "it runs")
        await asyncio.sleep(0.1)
        await backend.stop()
        assert b"stream_interrupted" in (await asked).body


async def test_an_unknown_model_gets_404_at_once_though_a_backend_was_never_seen(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    await other.stop()
    async with running(backend, other, wait=False) as under_test:
        await holds(lambda: under_test.state(other) == "down", "its first probe has ended")
        await holds(lambda: under_test.state(backend) == "up", "the other one serves")
        answer = await under_test.ask(chat(model="m0"))
        name = under_test.backend(other).name
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "Available models: " in answer.error["message"]
        assert answer.error["message"].endswith(f"{name}: connection refused.")


async def test_a_deadline_ends_the_wait_for_the_only_backend_with_the_reason(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        await backend.stop()
        await gone(under_test)
        answer = await under_test.ask(chat(), b"x-gateway-deadline-ms: 50")
        assert (answer.status, answer.error["code"]) == (503, "no_backend_available")
        assert answer.error["message"].endswith(f"{under_test.backend(backend).name}: connection refused.")
