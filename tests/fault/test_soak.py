"""Nothing leaks: mixed requests, clients that leave and engines that are cut off, and all is as it was before.

`make soak` sends a million of the same requests to a gateway in a process of its own.
"""

import asyncio
import gc
import os
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.bench.gateway_process import read_metrics
from tests.bench.mock_engine import MockEngine
from tests.bench.soak.command import ENGINES, PER_BACKEND, SECTIONS
from tests.bench.soak.figures import busy_gauges
from tests.bench.soak.traffic import Traffic, kill_in_turn
from tests.fault.rig import UnderTest, holds, merged, running

REQUESTS = 15_000
WARM_UP = 5_000
REQUESTS_PER_DEATH = 500
LEAST_DEATHS = 4
MAX_GROWTH_BYTES = 10 * 1048576
SPARE_FILES = 12


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(under_test: UnderTest) -> int:
    """File descriptors of this process, but for idle connections to engines: both ends of each are here."""
    idle = sum(len(pool._idle) for pool in under_test.gateway.core.relay._pools.values())
    return len(os.listdir("/proc/self/fd")) - 2 * idle


def named_tasks() -> set[str]:
    """The tasks that somebody gave a name, which are those that stay."""
    return {task.get_name() for task in asyncio.all_tasks() if not task.get_name().startswith("Task-")}


async def drive_while_engines_die(
    under_test: UnderTest, traffic: Traffic, engines: list[MockEngine], count: int
) -> Counter[str]:
    """Send this many requests; gives how often each engine was cut off."""
    deaths: Counter[str] = Counter()
    began = traffic.sent

    def is_due() -> bool:
        return traffic.sent - began > REQUESTS_PER_DEATH * (deaths.total() + 1)

    killing = asyncio.create_task(kill_in_turn(engines[1:], is_due, deaths))
    await traffic.drive(count)
    while deaths.total() < LEAST_DEATHS and not killing.done():  # the requests were quicker than the deaths
        await traffic.drive(REQUESTS_PER_DEATH)
    killing.cancel()
    await asyncio.gather(killing, return_exceptions=True)
    for engine in engines:
        if not engine.is_listening:
            await engine.start()
    await holds(lambda: all(under_test.state(each) == "up" for each in engines), "all are back")
    return deaths


@pytest.mark.timeout(240)
async def test_nothing_is_left_of_15000_mixed_requests_whose_clients_leave_and_engines_die() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(MockEngine()) for _ in range(ENGINES)]
        sections = merged({"routing": {"policy": "prefix"}}, SECTIONS)
        under_test = await stack.enter_async_context(running(*engines, sections=sections, per_backend=PER_BACKEND))
        traffic = Traffic(under_test.port, 1)
        await traffic.drive(200)
        await under_test.comes_to_rest()
        tasks = named_tasks()
        await traffic.drive(WARM_UP)
        await under_test.comes_to_rest()
        gc.collect()
        files, memory = open_files(under_test), resident_bytes() - len(under_test.log.getvalue())

        deaths = await drive_while_engines_die(under_test, traffic, engines, REQUESTS - WARM_UP)
        await under_test.comes_to_rest()
        gc.collect()
        grown = resident_bytes() - len(under_test.log.getvalue()) - memory

        print(traffic.tally, f"deaths {deaths.total()}", f"grown {grown / 1048576:.1f} MiB")  # noqa: T201
        assert traffic.wrong == []
        assert traffic.tally["200"] > REQUESTS * 0.7
        assert traffic.tally["left"] > REQUESTS * 0.1
        assert deaths.total() >= LEAST_DEATHS
        failed = sum(count for ending, count in traffic.tally.items() if " " in ending)
        assert failed < 60 * deaths.total(), traffic.tally  # what the engines were answering when they were cut off
        assert [engine.running for engine in engines] == [0] * ENGINES
        assert named_tasks() == tasks
        assert len(asyncio.all_tasks()) < 40
        assert open_files(under_test) <= files + SPARE_FILES
        assert grown < MAX_GROWTH_BYTES
        assert busy_gauges(page_of(under_test)) == []


def page_of(under_test: UnderTest) -> dict[str, float]:
    """The samples of /metrics."""
    registry = CollectorRegistry()
    registry.register(under_test.gateway.core.metrics)
    return read_metrics(generate_latest(registry).decode())
