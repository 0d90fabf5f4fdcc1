"""Closed and open loops in virtual time: who sends when, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.drive.client import open_session
from loadtest.drive.driver import Driver
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.report.timeline import peak, sweep
from tests.unit.loadtest.drive.recorded import (
    END,
    HEAD,
    REFUSED,
    WORD,
    Answer,
    RecordedServer,
    Recording,
    chunk,
    drive,
    event,
    seconds_from_now,
    stream,
)

pytestmark = pytest.mark.virtual_time

_SIZES = {"prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 4}


def _plan(url: str = "", **more: Any) -> Plan:
    return Plan.model_validate({"url": url, "model": "m", "workload": {"groups": 3, **_SIZES}} | more)


async def _run(answer: Answer, plan: Plan, **more: Any) -> list[Record]:
    async with RecordedServer(answer) as server:
        harvest = await drive(plan.model_copy(update={"url": server.url}), **more)
    return harvest.records


def _second_long(_: object) -> Recording:
    return stream(0.25, 0.5, 0.75, 1.0)


async def test_a_closed_loop_sends_every_request_once_and_the_next_when_one_has_ended() -> None:
    records = await _run(_second_long, _plan(concurrency=4, requests=10))
    assert [record.index for record in records] == list(range(10))
    assert all(record.ok for record in records)
    assert [record.sent for record in records] == pytest.approx([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    assert peak(sweep((record.sent, record.end) for record in records)) == 4


async def test_users_of_a_ramp_come_and_go_over_the_run() -> None:
    load = {"first_concurrency": 1, "concurrency": 4, "ramp_seconds": 6, "duration_seconds": 8}
    records = await _run(_second_long, _plan(**load))
    sent = [round(record.sent, 6) for record in records]
    assert [sent.count(second) for second in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
    down = {"first_concurrency": 4, "concurrency": 1, "ramp_seconds": 6, "duration_seconds": 8}
    records = await _run(_second_long, _plan(**down))
    sent = [round(record.sent, 6) for record in records]
    assert [sent.count(second) for second in range(8)] == [4, 4, 3, 3, 2, 2, 1, 1]


async def test_workers_split_a_run_without_overlap() -> None:
    plan = _plan(concurrency=5, requests=11, workers=2)
    first, second = await _run(_second_long, plan, worker=0), await _run(_second_long, plan, worker=1)
    assert sorted(record.index for record in first + second) == list(range(11))
    assert peak(sweep((record.sent, record.end) for record in first)) == 3


async def test_an_open_loop_keeps_sending_while_nothing_is_answered() -> None:
    plan = _plan(rate_per_second=2, requests=20, arrivals="constant")
    records = await _run(lambda _: stream(60.0), plan)
    assert [record.sent for record in records] == pytest.approx([number / 2 for number in range(20)])
    assert [record.intended for record in records] == [number / 2 for number in range(20)]
    assert all(record.ok for record in records)
    assert peak(sweep((record.sent, record.end) for record in records)) == 20


async def test_arrivals_beyond_the_limit_of_requests_in_flight_are_counted_as_dropped() -> None:
    plan = _plan(rate_per_second=2, requests=10, arrivals="constant", max_in_flight=3)
    records = await _run(lambda _: stream(3.75), plan)
    dropped = [record.index for record in records if record.outcome == "dropped"]
    assert dropped == [3, 4, 5, 6, 7]
    assert all(records[index].end == pytest.approx(index / 2) for index in dropped)
    assert all(record.ok for record in records if record.index not in dropped)


async def test_a_later_turn_beyond_the_limit_is_dropped_and_ends_its_session() -> None:
    sessions = {"kind": "sessions", "turns": (2, 2), "think_seconds": 1.0, "seed": 5} | _SIZES
    load = {"rate_per_second": 10, "arrivals": "constant", "requests": 2, "max_in_flight": 1}
    plan = _plan(workload=sessions, **load)
    first_quickly = iter([stream(0.05), stream(60.0), stream(0.05)])
    records = await _run(lambda _: next(first_quickly), plan)
    assert [(record.index, record.turn, record.outcome) for record in records] == [
        (0, 0, "ok"),
        (0, 1, "dropped"),
        (1, 0, "ok"),
        (1, 1, "ok"),
    ]


async def test_ending_a_run_early_records_what_was_in_flight_as_interrupted() -> None:
    records = await _run(lambda _: stream(1.0, 60.0), _plan(concurrency=3, requests=30), ends_after=10.0)
    assert [record.outcome for record in records] == ["interrupted"] * 3
    assert [(record.first_token, record.end) for record in records] == [(pytest.approx(1), pytest.approx(10))] * 3


async def test_a_refused_user_pauses_longer_each_time_instead_of_hammering() -> None:
    records = await _run(lambda _: REFUSED, _plan(concurrency=1, duration_seconds=4))
    assert [record.sent for record in records] == pytest.approx([0, 0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.55])
    assert {record.outcome for record in records} == {"http_429"}


async def test_warm_up_shares_no_prompt_with_the_measured_requests() -> None:
    async with RecordedServer(_second_long) as server:
        plan, clock = _plan(server.url, concurrency=2, requests=20, warmup_requests=3), seconds_from_now()
        async with open_session(plan, clock) as session:
            driver = Driver(plan, 0, session, clock=clock, emit=lambda _: None)
            assert [record.ok for record in await driver.warm_up()] == [True] * 3
        warm = {body["messages"][0]["content"][:8] for body in server.bodies}
        server.asked.clear()
        await drive(plan)
        measured = {message["content"][:8] for body in server.bodies for message in body["messages"]}
    assert len(warm) == 3
    assert not warm & measured


async def test_gaps_between_reads_are_counted_for_successful_streams_only() -> None:
    cut = Recording([(0.0, HEAD), (0.5, chunk(event(WORD))), (0.75, chunk(event(WORD)) + END)])
    async with RecordedServer(lambda asked: cut if asked.at else stream(0.5, 0.625, 1.0)) as server:
        harvest = await drive(_plan(server.url, concurrency=1, requests=2))
    assert [record.outcome for record in harvest.records] == ["ok", "stream_without_done"]
    assert harvest.itl_ticks == {12_500: 1, 37_500: 1}
