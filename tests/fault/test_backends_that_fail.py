"""Backends that refuse, hang, die and return: requests go elsewhere, and come back when the backend does."""

import asyncio
import os
import signal
import sys

import pytest

from tests.clients import Answer, chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import Connection, ScriptedBackend
from tests.scripts import drained, hang, json_answer, pause, raw, reset, stream, tokens, whole

STREAM = chat(stream=True)
ENGINE_DEAD = whole(500, b'{"error":{"message":"EngineCore encountered an issue. EngineDeadError","code":500}}')
UNWELL = whole(503, b"")


async def many(under_test: UnderTest, count: int, *, at_once: int = 8, body: bytes | None = None) -> list[Answer]:
    """The answers to this many requests, a few at a time."""
    answers: list[Answer] = []

    async def some() -> None:
        while len(answers) < count:
            answers.append(await under_test.ask(body))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(some())
    return answers


async def test_a_backend_that_refuses_connections_costs_no_request(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with running(backend, other) as under_test:
        await backend.stop()
        answers = await many(under_test, 500)
        assert {answer.status for answer in answers} == {200}
        tried = sum(count for labels, count in under_test.attempts.items() if labels[0] == backend.url[7:])
        assert tried - len(backend.ledger) <= 10


async def test_a_black_hole_costs_time_once_and_no_request(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    sections = {"upstream": {"connect_timeout_seconds": 0.3}}
    async with running(backend, other, sections=sections) as under_test:
        await backend.vanish()
        assert {answer.status for answer in await many(under_test, 60)} == {200}
        await holds(lambda: under_test.state(backend) != "up", "it is out")
        tried = sum(count for labels, count in under_test.attempts.items() if labels[0] == backend.url[7:])
        assert {answer.status for answer in await many(under_test, 60)} == {200}
        assert tried == sum(count for labels, count in under_test.attempts.items() if labels[0] == backend.url[7:])


async def test_a_backend_that_goes_down_and_returns_is_used_again(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    async with running(backend, other) as under_test:
        for _ in range(3):
            await backend.stop()
            assert {answer.status for answer in await many(under_test, 50)} == {200}
            await holds(lambda: under_test.state(backend) != "up", "it is out")
            await backend.start()
            await holds(lambda: under_test.state(backend) == "up", "it is back")
            before = len(backend.ledger)
            assert {answer.status for answer in await many(under_test, 50)} == {200}
            assert len(backend.ledger) > before


AT_ONCE = {"admission": {"hold_without_backend": False, "max_wait_seconds": 600}}  # longer than any test takes


async def test_while_all_backends_are_down_clients_are_told_at_once_where_nobody_is_held(
    backend: ScriptedBackend,
) -> None:
    async with running(backend, sections=AT_ONCE) as under_test:
        await backend.stop()
        await under_test.ask()
        await holds(lambda: not under_test.gateway.core.fleet.ready, "nobody can serve")
        for _ in range(20):
            answer = await under_test.ask()
            assert answer.status == 503
            assert answer.error["code"] == "no_backend_available"
            assert int(answer.header("retry-after") or 0) >= 1
            assert int(answer.header("retry-after-ms") or 0) >= 1
        for method in (b"GET", b"OPTIONS"):
            assert (await under_test.ask(method=method, target=b"/readyz")).status == 503
        assert (await under_test.ask(method=b"GET", target=b"/livez")).status == 200
        await backend.start()
        await holds(lambda: under_test.gateway.core.fleet.ready, "it serves again")
        assert (await under_test.ask()).status == 200


async def test_requests_in_line_for_a_backend_that_dies_are_told_where_nobody_is_held(
    backend: ScriptedBackend,
) -> None:
    backend.plays(hang())
    async with running(backend, sections=AT_ONCE, per_backend={"max_in_flight": 1}) as under_test:
        first = asyncio.create_task(under_test.ask())
        await holds(lambda: len(backend.ledger) == 1, "the first one runs")
        waiting = [asyncio.create_task(under_test.ask()) for _ in range(5)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 5, "five wait")
        await backend.stop()
        answers = await asyncio.gather(first, *waiting)
        assert {answer.status for answer in answers} <= {502, 503}


async def test_a_backend_that_resets_before_headers_is_ejected_and_no_request_is_lost(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(reset())
    async with running(backend, other, sections={"health": {"eject_failures": 3}}) as under_test:
        answers = await many(under_test, 200, at_once=1)
        assert {answer.status for answer in answers} == {200}
        assert under_test.state(backend) in ("ejected", "up")
        assert len(backend.ledger) < 12
        backend.plays(*json_answer())
        before = len(backend.ledger)
        await holds(lambda: under_test.state(backend) == "up", "it is back")
        assert {answer.status for answer in await many(under_test, 20)} == {200}
        assert len(backend.ledger) > before


async def test_a_backend_whose_engine_is_dead_is_ejected_at_once_and_the_request_had_elsewhere(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(raw(ENGINE_DEAD))
    async with running(backend, other, sections={"health": {"eject_base_seconds": 30}}) as under_test:
        answers = await many(under_test, 30, at_once=1)
        assert {answer.status for answer in answers} == {200}
        assert len(backend.ledger) == 1
        assert under_test.state(backend) == "ejected"  # though /health still says 200


async def test_a_dead_engine_that_is_the_only_one_passes_its_error_on(backend: ScriptedBackend) -> None:
    backend.plays(raw(ENGINE_DEAD))
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert answer.status == 500
        assert b"EngineDeadError" in answer.body


async def test_a_500_that_is_no_dead_engine_is_passed_on_and_not_repeated(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(raw(whole(500, b'{"error":{"message":"template error"}}')))
    async with running(backend, other) as under_test:
        answer = await under_test.ask()
        assert (answer.status, answer.body) == (500, b'{"error":{"message":"template error"}}')
        assert len(backend.ledger) + len(other.ledger) == 1


async def test_a_request_that_kills_backends_is_tried_on_two_and_no_third() -> None:
    async with ScriptedBackend() as a, ScriptedBackend() as b, ScriptedBackend() as c:
        for each in (a, b, c):
            each.plays(reset())
        async with running(a, b, c) as under_test:
            assert (await under_test.ask()).status == 502
            assert len(a.ledger) + len(b.ledger) + len(c.ledger) == 2


async def test_a_backend_too_busy_to_answer_health_while_its_tokens_flow_stays_in(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3000, seconds_apart=0.02))
    sections = {"health": {"probe_interval_seconds": 0.5, "probe_timeout_seconds": 0.3, "fall": 3}}
    async with running(backend, sections=sections) as under_test, await under_test.client() as client:
        await client.send(request(STREAM))
        await client.read()
        backend.control[b"/health"] = hang()
        reading = asyncio.create_task(client.end(30))
        await asyncio.sleep(4.0)
        assert under_test.state(backend) == "up"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


HUNG = {"health": {"probe_interval_seconds": 0.3, "probe_timeout_seconds": 0.3, "fall": 3}}


async def test_after_one_late_probe_others_are_preferred(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    async with running(backend, other, sections=HUNG) as under_test:
        backend.control[b"/health"] = hang()
        await holds(lambda: under_test.backend(backend).health.late, "a probe is late")
        before = len(backend.ledger)
        assert {answer.status for answer in await many(under_test, 20)} == {200}
        assert len(backend.ledger) == before


async def test_requests_without_a_byte_leave_a_backend_that_hangs(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(hang())
    async with running(backend, other, sections=HUNG) as under_test:
        asked = [asyncio.create_task(under_test.ask(body)) for body in (None, STREAM) * 10]
        await holds(lambda: len(backend.ledger) + len(other.ledger) == 20, "both have some")
        assert backend.ledger
        backend.control[b"/health"] = hang()
        moved = len(backend.ledger)
        other_before = len(other.ledger)
        await holds(lambda: len(other.ledger) == other_before + moved, "the other has all of them")
        assert not any(task.done() for task in asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_when_every_health_check_fails_requests_are_still_sent(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.control[b"/health"] = raw(UNWELL)
    async with running(backend, other, sections=AT_ONCE, wait=False) as under_test:
        await asyncio.sleep(0.1)
        assert (await under_test.ask()).status in (404, 503)  # nothing is known yet
    for each in (backend, other):
        each.control.clear()
    async with running(backend, other) as under_test:
        for each in (backend, other):
            each.control[b"/health"] = pause(30)
        await holds(lambda: under_test.state(backend) == under_test.state(other) == "down", "both are down")
        answers = await many(under_test, 100)
        assert {answer.status for answer in answers} == {200}


async def test_a_model_that_a_backend_has_lost_is_had_from_another(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    missing = whole(404, b'{"error":{"message":"The model `scripted` does not exist.","code":404}}')
    async with running(backend, other) as under_test:
        backend.cards = ({"id": "another"},)
        backend.plays(raw(missing))
        answers = await many(under_test, 20, at_once=1)
        await holds(
            lambda: under_test.backend(backend) not in (under_test.gateway.core.fleet.serving("scripted") or ()),
            "its list is read",
        )
        asked = len(backend.ledger)
        answers += await many(under_test, 30, at_once=1)
        assert {answer.status for answer in answers} == {200}
        assert len(backend.ledger) == asked


METRICS = {
    "hanging": [pause(30)],
    "garbage": [raw(whole(200, b"\xff\xfe{}[]\n" * 5000 + b"vllm:num_requests_running{ 5\n"))],
    "wrong numbers": [raw(whole(200, b'vllm:num_requests_running{engine="0"} many\n'))],
    "not there": [raw(whole(404, b"{}"))],
    "broken": [raw(whole(200, b"vllm:")[:-2]), pause(30)],
    "huge": [
        raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 500000000\r\n\r\n"),
        drained(b"vllm:num_requests_running{engine=\"0\"} 1\n" * 1600, 8000),
    ],
    "one endless line": [
        raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 500000000\r\n\r\nvllm:"),
        drained(b"x" * 65536, 8000),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
async def test_metrics_that_are_not_as_they_should_be_change_nothing_for_requests(
    backend: ScriptedBackend, name: str
) -> None:
    async def play(connection: Connection) -> None:
        for step in METRICS[name]:
            await step(connection)

    backend.control[b"/metrics"] = play
    async with running(backend) as under_test:
        under_test.expects_internal_errors = False
        for _ in range(4):
            assert {answer.status for answer in await many(under_test, 50)} == {200}
            await asyncio.sleep(0.2)
        assert under_test.state(backend) == "up"


STOPPABLE = """
import asyncio, sys
from tests.scripted import ScriptedBackend
from tests.scripts import stream
async def main():
    backend = ScriptedBackend(port=int(sys.argv[1]))
    await backend.start()
    backend.plays(*stream(3))
    print(backend.port, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Stoppable:
    """A backend in a process of its own, which can be frozen."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"


async def start_stoppable() -> Stoppable:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STOPPABLE, "0", stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    assert process.stdout is not None
    return Stoppable(process, int(await process.stdout.readline()))


async def test_a_frozen_backend_loses_what_it_has_not_begun_and_returns_when_it_thaws(other: ScriptedBackend) -> None:
    frozen = await start_stoppable()
    other.plays(*stream(3))
    try:
        async with running(frozen, other) as under_test:
            assert all(answer.is_done for answer in await many(under_test, 20, body=STREAM))
            frozen.process.send_signal(signal.SIGSTOP)
            stuck = [asyncio.create_task(under_test.ask(STREAM)) for _ in range(6)]
            await holds(lambda: under_test.state(frozen) == "down", "it is out")
            answers = await many(under_test, 100, body=STREAM)
            assert all(answer.is_done for answer in answers)
            assert all(answer.is_done for answer in await asyncio.gather(*stuck))
            frozen.process.send_signal(signal.SIGCONT)
            await holds(lambda: under_test.state(frozen) == "up", "it is back")
    finally:
        frozen.process.kill()
        await frozen.process.wait()


async def test_what_a_killed_backend_was_answering_is_had_elsewhere_or_told(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    backend.plays(*tokens(1), hang())
    other.plays(*stream(3))
    async with running(backend, other) as under_test:
        answers = [asyncio.create_task(under_test.ask(STREAM)) for _ in range(10)]
        await holds(lambda: len(backend.ledger) == 5, "half of them run there")
        await asyncio.sleep(0.05)
        await backend.stop()
        ended = await asyncio.gather(*answers)
        assert sum(answer.is_done for answer in ended) == 5
        assert all(b"stream_interrupted" in answer.body for answer in ended if not answer.is_done)
