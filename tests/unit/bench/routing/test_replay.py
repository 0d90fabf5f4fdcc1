"""Rows are sent when they are due, and what came of them is recorded."""

import asyncio

import pytest

from loadtest.engine.config import EngineConfig
from loadtest.engine.server import SimulatedEngine
from loadtest.workloads.prompts import BodyMaker, Endpoint
from tests.bench.routing.replay import bodies_of, capacity, endless, plan_for, replay
from tests.bench.routing.trace import Row
from tests.bench.routing.wording import Wording

WORDS = ["abc", "def", "ghi"]
ROWS = [Row(number * 0.05, (number % 2,), 4, 3) for number in range(6)]


async def nothing() -> None:
    """No event."""


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT])
async def test_every_row_is_answered_with_its_tokens_and_never_sent_early(endpoint: Endpoint) -> None:
    async with SimulatedEngine(EngineConfig(model="m", time_scale=0)) as engine:
        bodies = bodies_of(BodyMaker(endpoint, "m", stream=True), Wording(WORDS, "x"), ROWS)
        found = await replay(plan_for(engine.url, "m", endpoint), ROWS, bodies, 0.0, nothing)
    assert [record.outcome for record in found] == ["ok"] * len(ROWS)
    assert [record.intended for record in found] == [row.at for row in ROWS]
    assert all(record.sent >= record.intended - 0.001 for record in found)
    assert {record.completion_tokens for record in found} == {3}
    [told] = {record.prompt_tokens for record in found}
    assert told == 20 if endpoint is Endpoint.COMPLETIONS else told is not None and told > 20  # with the chat's marks


async def test_the_event_happens_at_its_time_beside_the_requests() -> None:
    happened: list[float] = []
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def event() -> None:
        happened.append(loop.time() - started)

    async with SimulatedEngine(EngineConfig(model="m", time_scale=0)) as engine:
        plan = plan_for(engine.url, "m", Endpoint.COMPLETIONS)
        bodies = bodies_of(BodyMaker(Endpoint.COMPLETIONS, "m", stream=True), Wording(WORDS, "x"), ROWS)
        await replay(plan, ROWS, bodies, 0.1, event)
    assert len(happened) == 1
    assert happened[0] >= 0.1


async def test_a_server_that_is_not_there_fails_each_request_and_not_the_replay() -> None:
    async with SimulatedEngine(EngineConfig(model="m")) as engine:
        url = engine.url
    bodies = bodies_of(BodyMaker(Endpoint.COMPLETIONS, "m", stream=True), Wording(WORDS, "x"), ROWS)
    found = await replay(plan_for(url, "m", Endpoint.COMPLETIONS), ROWS, bodies, 0.0, nothing)
    assert [record.outcome for record in found] == ["connect"] * len(ROWS)


async def test_capacity_is_what_busy_engines_answer_in_a_second() -> None:
    async with SimulatedEngine(EngineConfig(model="m")) as first, SimulatedEngine(EngineConfig(model="m")) as second:
        plans = [plan_for(engine.url, "m", Endpoint.COMPLETIONS) for engine in (first, second)]
        requests = endless(BodyMaker(Endpoint.COMPLETIONS, "m", stream=True), WORDS, ROWS)
        found = await capacity(plans, requests, users=2, seconds=0.8)
    # one user each, three steps of 8 ms a request
    assert 30 < found < 90


def test_each_round_of_an_endless_trace_says_the_same_in_other_words() -> None:
    requests = endless(BodyMaker(Endpoint.COMPLETIONS, "m", stream=True), WORDS, ROWS[:2])
    told = [next(requests) for _ in range(4)]
    assert [row for row, _ in told] == [*ROWS[:2], *ROWS[:2]]
    assert len({body for _, body in told}) == 4
