"""Clients that take every file descriptor: when they leave, everybody is served again."""

import asyncio
import resource

import pytest

from tests.bench.gateway_process import GatewayProcess, serving, wait_until_ready
from tests.bench.mock_engine import MockEngine
from tests.clients import Client, EndOfConnection, chat, request

SPARE_FILES = 6
IDLE_CLIENTS = 40
SECTIONS = {
    "health": {"probe_interval_seconds": 0.2, "probe_timeout_seconds": 0.5, "fall": 1, "rise": 1},
    "upstream": {"keep_alive_seconds": 0.2},  # so that requests need connections, and connections need descriptors
}


async def status_of(gateway: GatewayProcess) -> int:
    """The status that a chat request gets on a new connection; 0 = none within a while."""
    try:
        async with asyncio.timeout(2.0), await Client.connect(gateway.port) as client:
            await client.send(request(chat(model="fine")))
            return (await client.answer()).status
    except (EndOfConnection, OSError, TimeoutError):
        return 0


@pytest.mark.timeout(240)
async def test_a_gateway_without_descriptors_serves_again_as_soon_as_it_has_some() -> None:
    async with MockEngine() as engine:
        context = serving({**SECTIONS, "backends": [{"url": engine.url}]})
        gateway = await asyncio.to_thread(context.__enter__)
        try:
            await asyncio.to_thread(wait_until_ready, gateway)
            assert await status_of(gateway) == 200
            limit = gateway.open_files + SPARE_FILES
            resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (limit, limit))
            idle = [await Client.connect(gateway.port) for _ in range(IDLE_CLIENTS)]
            await status_of(gateway)  # with luck it is answered, but descriptors for the backend are short, too
            for client in idle:
                client.close()
            async with asyncio.timeout(30):
                while await status_of(gateway) != 200:
                    await asyncio.sleep(0.05)
            assert not gateway.has_ended
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
