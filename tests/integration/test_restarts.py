"""Every backend of a model restarts at the same time: its clients notice nothing but the wait."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from loadtest.servers.processes import free_ports
from tests.integration.fleet import CHAT_FLAGS, simulated_engine
from tests.integration.gateway_process import running_gateway
from tests.integration.observed import eventually, gateway_holds_nothing, queued_requests_become, read
from tests.integration.prompts import chat

pytestmark = pytest.mark.simulated("engines are started several times")
CLIENTS = 20


async def ask(sdk: AsyncOpenAI, number: int) -> int:
    """Every other one is a stream. How many tokens came."""
    if number % 2:
        answer = await sdk.chat.completions.create(**chat(tokens=8))
        return answer.usage.completion_tokens if answer.usage else 0
    events = await sdk.chat.completions.create(**chat(tokens=8), stream=True, stream_options={"include_usage": True})
    return [event.usage.completion_tokens async for event in events if event.usage is not None][-1]


async def test_while_every_engine_restarts_no_request_fails_and_comments_keep_streams_alive(tmp_path: Path) -> None:
    ports = free_ports(2)
    config = {
        "backends": [{"url": f"http://127.0.0.1:{port}"} for port in ports],
        "health": {"probe_interval_seconds": 0.5},
        "admission": {"comment_seconds": 0.2},
    }
    with ExitStack() as before:
        for port in ports:
            before.enter_context(simulated_engine(tmp_path, *CHAT_FLAGS, port=port))
        with running_gateway(tmp_path, config) as gateway:
            async with gateway.client() as sdk:

                async def all_up() -> bool:
                    return await read(gateway.admin_url, "gateway_backend_up") == len(ports)

                await eventually(all_up, "both are up")
                assert await ask(sdk, 1) == 8
                before.close()
                asked = [asyncio.create_task(ask(sdk, number)) for number in range(CLIENTS)]
                await queued_requests_become(gateway.admin_url, CLIENTS)
                for task in asked[:4]:
                    task.cancel()
                await queued_requests_become(gateway.admin_url, CLIENTS - 4)
                with ExitStack() as after:
                    for port in ports:
                        after.enter_context(simulated_engine(tmp_path, *CHAT_FLAGS, port=port))
                    assert await asyncio.gather(*asked[4:]) == [8] * (CLIENTS - 4)
                    await gateway_holds_nothing(gateway.admin_url)
