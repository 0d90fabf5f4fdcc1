"""Backends that are busy: their load spills over, and what nobody can take is told as it is."""

import asyncio

import pytest

from tests.clients import chat
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import hang, json_answer, raw, until, whole


def busy(status: int) -> bytes:
    return whole(status, b'{"error":{"message":"too many requests waiting"}}', b"retry-after: 3")


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_backend_spills_over_to_another(
    backend: ScriptedBackend, other: ScriptedBackend, status: int
) -> None:
    backend.plays(raw(busy(status)))
    async with running(backend, other, sections={"upstream": {"retry_budget_min": 1000}}) as under_test:
        answers = [await under_test.ask() for _ in range(40)]
        assert {answer.status for answer in answers} == {200}
        assert under_test.state(backend) == "up"  # busy is not broken


@pytest.mark.parametrize("status", [429, 503])
async def test_what_no_backend_can_take_is_told_as_the_backend_told_it(
    backend: ScriptedBackend, other: ScriptedBackend, status: int
) -> None:
    for each in (backend, other):
        each.plays(raw(busy(status)))
    async with running(backend, other) as under_test:
        answer = await under_test.ask()
        assert answer.status == status
        assert answer.header("retry-after") == "3"
        assert b"too many requests waiting" in answer.body
        assert (len(backend.ledger), len(other.ledger)) == (1, 1)


async def test_the_only_backend_being_busy_is_passed_on(backend: ScriptedBackend) -> None:
    backend.plays(raw(busy(503)))
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert (answer.status, answer.header("retry-after")) == (503, "3")
        assert len(backend.ledger) == 1


async def test_retries_stay_within_their_budget(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    count = 300
    for each in (backend, other):
        each.plays(raw(busy(503)))
    sections = {"upstream": {"retry_budget_fraction": 0.1, "retry_budget_min": 3}}
    async with running(backend, other, sections=sections) as under_test:
        for _ in range(count):
            await under_test.ask()
        assert len(backend.ledger) + len(other.ledger) <= 1.1 * count + 3


async def test_a_backend_never_has_more_in_flight_than_its_cap(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    go = asyncio.Event()
    for each in (backend, other):
        each.plays(until(go), *json_answer())
    async with running(backend, other, per_backend={"max_in_flight": 4}) as under_test:
        tasks = [asyncio.create_task(under_test.ask()) for _ in range(50)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 42, "the rest waits")
        assert (backend.running, other.running) == (4, 4)
        go.set()
        assert {answer.status for answer in await asyncio.gather(*tasks)} == {200}
        assert max(backend.most_running, other.most_running) <= 4


async def test_a_full_line_and_a_wait_too_long_are_429_with_a_time_to_return(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    sections = {"admission": {"max_queued_requests": 2, "max_wait_seconds": 0.5}}
    async with running(backend, sections=sections, per_backend={"max_in_flight": 1}) as under_test:
        running_one = asyncio.create_task(under_test.ask())
        await holds(lambda: len(backend.ledger) == 1, "one runs")
        waiting = [asyncio.create_task(under_test.ask()) for _ in range(2)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 2, "two wait")
        refused = await under_test.ask()
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        for answer in await asyncio.gather(*waiting):
            assert (answer.status, answer.error["code"]) == (429, "queue_timeout")
            assert answer.header("retry-after") is not None
            assert answer.header("retry-after-ms") is not None
        running_one.cancel()
        await asyncio.gather(running_one, return_exceptions=True)
        await under_test.comes_to_rest()
        assert len(backend.ledger) == 1


async def test_the_line_is_bounded_in_bytes(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    sections = {"admission": {"max_queued_bytes": 100_000, "max_wait_seconds": 0.5}}
    async with running(backend, sections=sections, per_backend={"max_in_flight": 1}) as under_test:
        tasks = [asyncio.create_task(under_test.ask())]
        await holds(lambda: len(backend.ledger) == 1, "one runs")
        tasks += [asyncio.create_task(under_test.ask(chat("x" * 40_000))) for _ in range(2)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 2, "two wait")
        assert (await under_test.ask(chat("x" * 40_000))).status == 429
        assert {answer.status for answer in await asyncio.gather(*tasks[1:])} == {429}
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
