"""Whether a server serves yet: only a 200 says so."""

import asyncio

import pytest

from gateway.cli.demo import free_ports
from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.servers.processes import NotServing, serves, wait_until_serving


async def test_a_server_serves_when_it_answers_200() -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0)) as engine:
        assert await asyncio.to_thread(serves, f"{engine.url}/health")
        assert not await asyncio.to_thread(serves, f"{engine.url}/nowhere")


def test_where_nothing_listens_nothing_serves() -> None:
    assert not serves(f"http://127.0.0.1:{free_ports(1)[0]}/health")


def test_one_that_ends_or_takes_too_long_is_not_waited_for() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/health"
    with pytest.raises(NotServing, match="exit code 3"):
        wait_until_serving(url, lambda: 3, 20.0)
    with pytest.raises(NotServing, match=r"after 0 s"):
        wait_until_serving(url, lambda: None, 0.0)


async def test_whoever_answers_at_the_port_of_one_that_has_ended_is_another() -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0)) as engine:
        with pytest.raises(NotServing, match="exit code 1"):
            await asyncio.to_thread(wait_until_serving, f"{engine.url}/health", lambda: 1, 20.0)
        assert await asyncio.to_thread(wait_until_serving, f"{engine.url}/health", lambda: None, 20.0) < 20.0
