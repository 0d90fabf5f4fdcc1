"""However backends fail, and in whatever order, a request is executed at most twice, under all its models together."""

import asyncio
from collections import Counter
from random import Random

import pytest

from gateway.core.dispatch import MOST_EXECUTIONS
from tests.clients import chat
from tests.fault.rig import running
from tests.scripted import ScriptedBackend
from tests.scripts import fin, json_answer, raw, reset, whole

BUSY = whole(503, b'{"error":{"message":"busy"}}')
FAILURES = {"closed": (fin(),), "reset": (reset(),), "busy": (raw(BUSY),)}
FREE = {
    "upstream": {"retry_budget_min": 1000},
    "health": {"eject_failures": 1000},
    "models": {"scripted": {"fallback": ["spare"]}},
}


def executions(*backends: ScriptedBackend) -> Counter[str]:
    return Counter(seen.request_id for backend in backends for seen in backend.ledger)


@pytest.mark.parametrize("second", FAILURES)
@pytest.mark.parametrize("first", FAILURES)
async def test_two_failures_on_warm_connections_are_the_last_ones(
    backend: ScriptedBackend, other: ScriptedBackend, first: str, second: str
) -> None:
    async with running(backend, other, sections=FREE) as under_test:
        for _ in range(4):  # both have an idle connection
            assert (await under_test.ask()).status == 200
        for each in (backend, other):
            each.ledger.clear()
            each.plays_once(*FAILURES[first])
            each.plays_once(*FAILURES[second])
        assert (await under_test.ask()).status in (502, 503)
        assert [*executions(backend, other).values()] == [MOST_EXECUTIONS]


@pytest.mark.parametrize("seed", range(24))
async def test_in_a_storm_of_failures_no_request_is_executed_a_third_time(seed: int) -> None:
    random = Random(seed)
    async with (
        ScriptedBackend() as one,
        ScriptedBackend() as two,
        ScriptedBackend("spare") as three,
        ScriptedBackend("spare") as four,
    ):
        engines = (one, two, three, four)
        for engine in engines:
            for _ in range(100):
                engine.plays_once(*random.choice([*FAILURES.values(), json_answer(), json_answer()]))
        async with running(*engines, sections=FREE) as under_test:

            async def one_client() -> None:
                for _ in range(15):
                    await under_test.ask(chat())

            await asyncio.gather(*(one_client() for _ in range(8)))
            counts = executions(*engines)
            assert len(counts) == 120
            assert max(counts.values()) == MOST_EXECUTIONS
