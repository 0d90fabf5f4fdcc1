"""Two engines that run fewer sequences than the gateway is told: it finds out, and sends no more than they can run."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI

from loadtest.servers.server import Server
from tests.integration.fleet import CHAT_FLAGS, name_of, simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, read, samples, total
from tests.integration.prompts import chat

SEATS = 8
USERS = 80
DEADLINE_SECONDS = 120.0  # of a limit that waits for streams to end before each move

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def small_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """They do not tell how many sequences they run at once."""
    logs = tmp_path_factory.mktemp("small-engines")
    with ExitStack() as stack:
        flags = (*CHAT_FLAGS, "--max-num-seqs", str(SEATS))
        yield [stack.enter_context(simulated_engine(logs, *flags)) for _ in range(2)]


@asynccontextmanager
async def crowd(client: AsyncOpenAI) -> AsyncIterator[None]:
    """Users who ask again as soon as they are answered, while the block runs."""

    async def user() -> None:
        while True:
            await client.chat.completions.create(**chat(tokens=20))

    async with asyncio.TaskGroup() as group:
        users = [group.create_task(user()) for _ in range(USERS)]
        try:
            yield
        finally:
            for each in users:
                each.cancel()


async def limits(gateway: Gateway, engines: list[Server]) -> list[float]:
    found = await samples(gateway.admin_url)
    return [total(found, "gateway_backend_in_flight_limit", backend=name_of(engine)) for engine in engines]


async def moves(gateway: Gateway, engine: Server, reason: str) -> float:
    return await read(gateway.admin_url, "gateway_limit_moves_total", backend=name_of(engine), reason=reason)


async def test_the_limit_falls_to_what_engines_run_and_rises_again(small_engines: list[Server], tmp_path: Path) -> None:
    config = {
        "backends": [{"url": engine.url} for engine in small_engines],
        "health": {"probe_interval_seconds": 0.25},
    }
    with running_gateway(tmp_path, config) as gateway:

        async def serving() -> bool:
            return await read(gateway.admin_url, "gateway_backend_up") == 2

        async def fallen() -> bool:
            return all(SEATS <= limit <= SEATS + 4 for limit in await limits(gateway, small_engines))

        async def risen() -> bool:
            return all([await moves(gateway, engine, "room") >= 1 for engine in small_engines])

        await eventually(serving, "both engines are up")
        assert await limits(gateway, small_engines) == [256, 256]
        async with gateway.client() as client, crowd(client):
            await eventually(fallen, "limits near what the engines run", DEADLINE_SECONDS)
            assert all([await moves(gateway, engine, "waiting") >= 1 for engine in small_engines])
            await eventually(risen, "limits grow while all places are in use", DEADLINE_SECONDS)
            await eventually(fallen, "limits stay near what the engines run", DEADLINE_SECONDS)
            waiting = [await read(engine.url, "vllm:num_requests_waiting") for engine in small_engines]
            assert max(waiting) <= 4
        async with aiohttp.ClientSession() as session, session.get(f"{gateway.admin_url}/admin/backends") as answer:
            shown = {each["name"]: each for each in (await answer.json())["backends"]}
        for engine in small_engines:
            assert shown[name_of(engine)]["limit_upper"] == 256
            assert shown[name_of(engine)]["limit_moved"]["reason"] in ("waiting", "room")
