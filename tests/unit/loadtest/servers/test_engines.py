"""Engines are kept apart, and their counters survive a restart."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from loadtest.engine.config import EngineConfig
from loadtest.engine.scheduler import Limits
from loadtest.engine.server import SimulatedEngine
from loadtest.servers.engines import EngineOptions, Engines, Kind, cores_of
from loadtest.servers.server import Launch, Server

PROMPT = " abc" * 64


def in_process(engine: SimulatedEngine) -> Server:
    """An engine of the test's own, in place of a process."""
    return Server(Launch([], engine.url), Path("log"))


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    config = EngineConfig(model="m", time_scale=0, dev_mode=True, limits=Limits(8, 2048, block_size=32, num_blocks=64))
    async with SimulatedEngine(config) as first, SimulatedEngine(config) as second:
        yield Engines(EngineOptions(Kind.SIM), [in_process(first), in_process(second)])


async def ask(url: str) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()


async def test_hits_are_counted_from_the_start_over_all_engines(engines: Engines) -> None:
    await ask(engines.urls[0])
    await engines.make_cold()
    await engines.start_counting()
    for url in (engines.urls[0], engines.urls[0], engines.urls[1]):
        await ask(url)
    counted = await engines.counted()
    assert (counted.hit_tokens, counted.prompt_tokens) == (32, 192)  # the last block is always computed
    assert (counted.requests, counted.preemptions) == ((2, 1), 0)


async def test_what_an_engine_counted_before_its_restart_is_kept(engines: Engines) -> None:
    await engines.start_counting()
    await ask(engines.urls[0])
    await engines.note_before_restart(0)
    async with SimulatedEngine(EngineConfig(model="m", time_scale=0)) as again:
        engines.processes[0] = in_process(again)
        await ask(again.url)
        await ask(engines.urls[1])
        counted = await engines.counted()
    assert counted.requests == (2, 1)
    assert counted.prompt_tokens == 192


@pytest.mark.parametrize(
    ("count", "allowed", "expected"),
    [(2, [0, 1], [{0}, {1}]), (2, [4, 5, 6, 7, 8], [{4, 5}, {6, 7}]), (3, [0, 1], [{0, 1}, {0, 1}, {0, 1}])],
)
def test_engines_share_no_cores_where_there_are_enough(
    count: int, allowed: list[int], expected: list[set[int]]
) -> None:
    assert [cores_of(number, count, allowed) for number in range(count)] == expected


@pytest.mark.parametrize(("count", "some"), [(2, [0]), (3, [0]), (4, [0, 1])])
def test_faults_happen_to_half_of_the_engines(count: int, some: list[int]) -> None:
    processes = [Server(Launch([], ""), Path("log")) for _ in range(count)]
    assert list(Engines(EngineOptions(Kind.SIM, count), processes).some()) == some
