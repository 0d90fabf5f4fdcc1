"""Whether a server serves yet: only a 200 says so."""

import asyncio

from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.vllm_cpu.process import free_ports
from loadtest.vllm_cpu.serving import serves


async def test_a_server_serves_when_it_answers_200() -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0)) as engine:
        assert await asyncio.to_thread(serves, f"{engine.url}/health")
        assert not await asyncio.to_thread(serves, f"{engine.url}/nowhere")


def test_where_nobody_listens_nothing_serves() -> None:
    assert not serves(f"http://127.0.0.1:{free_ports(1)[0]}/health")
