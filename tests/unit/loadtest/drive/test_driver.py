"""Closed and open loops against a tiny server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from loadtest.drive.client import open_session
from loadtest.drive.driver import Driver
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.report.timeline import peak, sweep

pytestmark = pytest.mark.flaky(reruns=2)  # clocks of a shared machine: what holds, holds in one of three tries


def _plan(url: str, **more: Any) -> Plan:
    workload = {"groups": 3, "prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 4}
    return Plan.model_validate({"url": url, "model": "m", "workload": workload, **more})


async def _run(
    plan: Plan, worker: int = 0, until: Callable[[], bool] | None = None, each: Callable[[int], None] | None = None
) -> list[Record]:
    origin = time.monotonic()
    records: list[Record] = []

    def clock() -> float:
        return time.monotonic() - origin

    def emit(record: Record) -> None:
        records.append(record)
        if each is not None:
            each(len(records))

    async with open_session(plan) as session, asyncio.timeout(20):
        driver = Driver(plan, worker, session, clock, emit)
        running = asyncio.create_task(driver.run())
        while until is not None and not until():
            await asyncio.sleep(0)
        if until is not None:
            running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()
        assert driver.in_flight == 0
    return records


async def test_a_closed_loop_sends_every_request_once_and_never_more_at_a_time(fake: Any) -> None:
    records = await _run(_plan(fake.url, concurrency=4, requests=30))
    assert sorted(record.index for record in records) == list(range(30))
    assert all(record.ok for record in records)
    assert peak(sweep((record.sent, record.end) for record in records)) == 4
    assert fake.peak <= 4


async def test_workers_split_a_run_without_overlap(fake: Any) -> None:
    plan = _plan(fake.url, concurrency=5, requests=11, workers=2)
    first, second = await _run(plan, 0), await _run(plan, 1)
    assert sorted(record.index for record in first + second) == list(range(11))


async def test_an_open_loop_keeps_sending_while_nothing_is_answered(fake: Any) -> None:
    plan = _plan(fake.url, rate_per_second=200, requests=20, arrivals="constant", extra_body={"act": "held"})

    def all_sent() -> bool:
        if fake.open_requests == 20:
            fake.release.set()
        return False

    waiting = asyncio.create_task(_watch(all_sent, lambda: fake.release.is_set()))
    records = await _run(plan)
    await waiting
    assert fake.peak == 20
    assert all(record.ok for record in records)


async def _watch(look: Callable[[], bool], over: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not over():
            look()
            await asyncio.sleep(0.001)


async def test_arrivals_beyond_the_limit_of_requests_in_flight_are_counted_as_dropped(fake: Any) -> None:
    plan = _plan(fake.url, rate_per_second=500, requests=10, max_in_flight=3, extra_body={"act": "held"})

    def answer_once_the_rest_is_dropped(ended: int) -> None:
        if ended == 7:
            fake.release.set()

    records = await _run(plan, each=answer_once_the_rest_is_dropped)
    outcomes = [record.outcome for record in records]
    assert outcomes.count("ok") == 3
    assert outcomes.count("dropped") == 7


async def test_a_later_turn_beyond_the_limit_is_dropped_and_ends_its_session(fake: Any) -> None:
    sizes = {"prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 4}
    sessions = {"kind": "sessions", "turns": (2, 2), "think_seconds": 1.0, "seed": 5} | sizes
    load = {"rate_per_second": 10, "arrivals": "constant", "requests": 2, "max_in_flight": 1}
    plan = Plan.model_validate(
        {"url": fake.url, "model": "m", "workload": sessions, "extra_body": {"act": "held"}} | load
    )
    fake.release.set()

    def hold_the_second_session_until_the_first_is_dropped(ended: int) -> None:
        if ended == 1:
            fake.release.clear()
        elif ended == 2:
            fake.release.set()

    records = await _run(plan, each=hold_the_second_session_until_the_first_is_dropped)
    reported = [(record.index, record.turn, record.outcome) for record in records]
    assert reported[:3] == [(0, 0, "ok"), (0, 1, "dropped"), (1, 0, "ok")]
    assert fake.peak == 1


async def test_ending_a_run_early_records_what_was_in_flight_as_interrupted(fake: Any) -> None:
    plan = _plan(fake.url, concurrency=3, requests=30, extra_body={"act": "held"})
    records = await _run(plan, until=lambda: fake.open_requests == 3)
    assert [record.outcome for record in records] == ["interrupted"] * 3


async def test_a_refused_user_pauses_instead_of_hammering(fake: Any) -> None:
    plan = _plan(fake.url, concurrency=1, duration_seconds=0.4, extra_body={"act": "refused"})
    records = await _run(plan)
    assert 2 <= len(records) <= 5
    assert {record.outcome for record in records} == {"http_429"}


async def test_warm_up_shares_no_prompt_with_the_measured_requests(fake: Any) -> None:
    plan = _plan(fake.url, concurrency=2, requests=20, warmup_requests=3)
    async with open_session(plan) as session:
        driver = Driver(plan, 0, session, time.monotonic, lambda _: None)
        assert [record.ok for record in await driver.warm_up()] == [True] * 3
    warm = {body["messages"][0]["content"][:8] for body in fake.bodies}
    fake.bodies.clear()
    await _run(plan)
    measured = {message["content"][:8] for body in fake.bodies for message in body["messages"]}
    assert len(warm) == 3
    assert not warm & measured


async def test_gaps_between_reads_are_counted_for_successful_streams_only(fake: Any) -> None:
    plan = _plan(fake.url, concurrency=1, requests=2, extra_body={"act": "cut"})
    async with open_session(plan) as session:
        driver = Driver(plan, 0, session, time.monotonic, lambda _: None)
        await driver.run()
    assert driver.itl_ticks.total() == 0
