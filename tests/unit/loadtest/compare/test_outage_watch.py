"""What reached engines is counted over their restarts, and seen to come back."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from loadtest.compare.outage.run import Reached, Watch, back_in_share_seconds, reached
from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.servers.processes import free_ports
from tests.unit.loadtest.compare.outage_turns import steadily

PAGE = """\
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 7.0
http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0
http_requests_total{handler="/v1/models",method="GET",status="2xx"} 100.0
http_requests_total{handler="/health",method="GET",status="2xx"} 100.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
"""


def test_what_has_ended_and_what_is_held_has_reached_an_engine() -> None:
    assert reached(PAGE) == 13.0
    assert reached("") == 0.0


def test_an_engine_that_was_started_again_counts_from_zero() -> None:
    seen = Reached([0.0, 1.0, 2.0, 3.0, 4.0], [(5.0, 1.0), (9.0, 2.0), (None, 3.0), (2.0, 3.0), (3.0, 3.0)])
    assert seen.arrivals() == [(0.0, 0.0), (4.0, 1.0), (0.0, 1.0), (2.0, 0.0), (1.0, 0.0)]
    assert seen.total() == 9.0


def test_an_engine_that_hung_goes_on_counting_and_a_look_between_two_counters_is_made_good() -> None:
    seen = Reached([0.0, 1.0, 2.0, 3.0], [(5.0,), (None,), (8.0,), (7.0,)])
    assert seen.arrivals() == [(0.0,), (0.0,), (3.0,), (-1.0,)]
    assert Reached().total() == 0.0


def test_an_engine_has_its_share_again_when_it_gets_half_of_what_it_got_before() -> None:
    assert back_in_share_seconds(steadily(), 0, 10.0, 22.0) == 0.0
    late = steadily()
    late.counts = [
        (mine if at <= 10 else None if at < 22 else max(0.0, at - 30), other)
        for at, (mine, other) in zip(late.at, late.counts, strict=True)
    ]
    found = back_in_share_seconds(late, 0, 10.0, 22.0)
    assert found is not None
    assert 6.0 <= found <= 8.0


@pytest.mark.parametrize("requests", [0.0, 5.0])
def test_an_engine_that_gets_nothing_is_not_back_in_its_share(requests: float) -> None:
    seen = Reached([float(at) for at in range(40)], [(min(float(at), requests), float(at)) for at in range(40)])
    assert back_in_share_seconds(seen, 0, 10.0, 22.0) is None


async def test_engines_are_looked_at_and_one_that_is_not_there_says_nothing() -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0)) as engine, aiohttp.ClientSession() as session:
        watch = Watch(session, [engine.url, f"http://127.0.0.1:{free_ports(1)[0]}"], lambda: 1.5)
        await watch.look()
        async with session.post(f"{engine.url}/v1/completions", json={"model": "sim", "prompt": "a"}) as answer:
            await answer.read()
        looking = asyncio.create_task(watch.go_on())
        while len(watch.seen.at) < 2:
            await asyncio.sleep(0.01)
        looking.cancel()
    assert watch.seen.counts[:2] == [(0.0, None), (1.0, None)]
    assert watch.seen.at[:2] == [1.5, 1.5]
