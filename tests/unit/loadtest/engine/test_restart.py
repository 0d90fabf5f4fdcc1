"""A restart makes a new process of a simulated engine: what was in memory is gone, its addresses stay."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import count

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.engine.kv_events import KvEventsConfig
from loadtest.engine.ledger import Ending
from tests.unit.loadtest.engine.conftest import LIMITS
from tests.unit.loadtest.engine.kv_client import kv_client
from tests.unit.loadtest.engine.support import eventually, idle

CONFIG = EngineConfig(
    limits=LIMITS,
    time_scale=0,
    max_model_len=4096,
    control=True,
    data_parallel_size=2,
    kv_events=KvEventsConfig("tcp://*:0", "tcp://*:0"),
)
BODY = {"messages": [{"role": "user", "content": "w" * 400}], "max_tokens": 2}
ENDLESS = {**BODY, "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture
async def simulated(request: pytest.FixtureRequest) -> AsyncIterator[SimulatedEngine]:
    """An engine that publishes, at whose every look the clock is an hour later."""
    hours: Iterator[int] = count(500_000)
    config = getattr(request, "param", CONFIG)
    async with SimulatedEngine(config, unix_seconds=lambda: next(hours) * 3600.0, seed=1) as running:
        yield running


async def chat(http: aiohttp.ClientSession, engine: SimulatedEngine) -> int:
    async with http.post(f"{engine.url}/v1/chat/completions", json=BODY) as answer:
        cached: int = (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


async def metrics(http: aiohttp.ClientSession, engine: SimulatedEngine) -> dict[str, float]:
    """The samples of rank 0, and those of the process."""
    async with http.get(f"{engine.url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return {s.name: s.value for family in families for s in family.samples if s.labels.get("engine", "0") == "0"}


async def test_a_restarted_engine_counts_and_caches_from_nothing(
    http: aiohttp.ClientSession, simulated: SimulatedEngine
) -> None:
    for _ in range(2):
        await chat(http, simulated)
    await chat(http, simulated)
    before, old = await metrics(http, simulated), simulated.service.kv_events
    assert old is not None
    async with http.post(f"{simulated.url}/sim/restart") as answer:
        assert answer.status == 200
    after = await metrics(http, simulated)
    started = "process_start_time_seconds"
    assert after[started] > before[started]
    assert after["vllm:prompt_tokens_total"] == after["vllm:prompt_tokens_created"] - after[started] == 0
    assert before["vllm:prompt_tokens_total"] > 0
    assert await chat(http, simulated) == 0
    new = simulated.service.kv_events
    assert new is not None
    assert new.sources() == old.sources()
    with kv_client(new.by_rank[0]) as client:
        assert [(batch.seq, batch.rank) for batch in await client.replay(0)] == [(0, 0)]


async def test_a_subscriber_gets_the_new_numbers_at_the_same_address(
    http: aiohttp.ClientSession, simulated: SimulatedEngine
) -> None:
    assert simulated.service.kv_events is not None
    with kv_client(simulated.service.kv_events.by_rank[0]) as client:
        await client.joined()
        await simulated.restart()
        client.publisher = simulated.service.kv_events.by_rank[0]
        await client.joined()
        await chat(http, simulated)
        batches = await client.until_marker()
    assert [batch.events[0]["type"] for batch in batches] == ["BlockStored"]


@pytest.mark.parametrize("simulated", [replace(CONFIG, time_scale=1.0)], indirect=True)
async def test_what_was_under_way_breaks_off(http: aiohttp.ClientSession, simulated: SimulatedEngine) -> None:
    async with http.post(f"{simulated.url}/v1/chat/completions", json=ENDLESS) as stream:
        await stream.content.readuntil(b"\n\n")
        plain = asyncio.create_task(
            http.post(f"{simulated.url}/v1/chat/completions", json={**ENDLESS, "stream": False})
        )
        await eventually(lambda: simulated.service.engine.num_requests == 2)
        async with http.post(f"{simulated.url}/sim/restart") as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await stream.content.read()
        with pytest.raises(aiohttp.ClientError):
            await plain
    await eventually(lambda: idle(simulated))
    assert simulated.service.ledger.endings[Ending.ABORTED] == 2
    assert simulated.service.server_load == 0


async def test_a_new_process_is_healthy_and_serves_the_model_it_was_started_with(
    http: aiohttp.ClientSession, simulated: SimulatedEngine
) -> None:
    faults = {"engine_paused": True, "kv_events_hang": True, "model": "another"}
    async with http.post(f"{simulated.url}/sim/faults", json=faults) as answer:
        assert answer.status == 200
    async with http.post(f"{simulated.url}/sim/restart") as answer:
        assert answer.status == 200
    await chat(http, simulated)
    async with http.get(f"{simulated.url}/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "another"
    async with http.get(f"{simulated.url}/sim/faults") as answer:
        assert (await answer.json())["engine_paused"] is False


async def test_an_engine_without_events_restarts_too(http: aiohttp.ClientSession, engine: SimulatedEngine) -> None:
    await chat(http, engine)
    await engine.restart()
    async with aiohttp.ClientSession() as another:
        assert await chat(another, engine) == 0
