"""An engine whose KV cache is too small for what it could run at once: it preempts, but hardly behind the gateway."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI

from loadtest.servers.server import Server
from tests.integration.fleet import CHAT_FLAGS, CHAT_MODEL, name_of, simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway, violations
from tests.integration.observed import eventually, gateway_holds_nothing, read, samples, total

pytestmark = pytest.mark.alone  # preemptions depend on how soon the gateway hears of tokens

KV_TOKENS = 8192
USERS, TURNS = 20, 2
PROMPT_WORDS, ANSWER_TOKENS = 400, 400
FEW_PREEMPTIONS = 2  # of 40 requests: the gateway counts tokens as they arrive, which a loaded machine delays
RESERVED, LIMIT = "gateway_backend_kv_tokens_reserved", "gateway_backend_kv_tokens_limit"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Server]:
    """A third of the users fill its KV cache."""
    with simulated_engine(tmp_path, *CHAT_FLAGS, "--kv-tokens", str(KV_TOKENS), "--time-scale", "0.3") as running:
        yield running


async def crowd(client: AsyncOpenAI) -> None:
    """Users with prompts of their own, whose answers are as long as they may be."""

    async def user(number: int) -> None:
        for turn in range(TURNS):
            prompt = f"{number}.{turn} " + " ".join(f"word{number * word}" for word in range(PROMPT_WORDS))
            stream = await client.chat.completions.create(
                model=CHAT_MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=ANSWER_TOKENS, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"

    async with asyncio.TaskGroup() as group:
        for number in range(USERS):
            group.create_task(user(number))


async def preemptions(engine: Server) -> float:
    return await read(engine.url, "vllm:num_preemptions_total")


async def test_without_the_gateway_the_engine_preempts(engine: Server) -> None:
    """Or the test below would show nothing."""
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        await crowd(client)
    assert await preemptions(engine) > FEW_PREEMPTIONS


async def test_with_the_gateway_it_hardly_does_and_its_cache_is_in_use(engine: Server, tmp_path: Path) -> None:
    with running_gateway(tmp_path, {"backends": [{"url": engine.url}]}) as gateway:
        most = await serve_the_crowd(gateway, engine)
        assert await preemptions(engine) <= FEW_PREEMPTIONS
        async with aiohttp.ClientSession() as session, session.get(f"{gateway.admin_url}/admin/backends") as answer:
            [shown] = (await answer.json())["backends"]
        assert (shown["kv_tokens_limit"], shown["kv_tokens_reserved"]) == (KV_TOKENS, 0)
        assert most > 0.8 * shown["kv_tokens_limit"]
        assert violations(gateway) == []


async def serve_the_crowd(gateway: Gateway, engine: Server) -> float:
    """The most KV tokens that were seen reserved meanwhile."""
    most = 0.0

    async def known() -> bool:
        return await read(gateway.admin_url, LIMIT) > 0

    await eventually(known, "the size of the KV cache is known")
    async with gateway.client() as client:
        served = asyncio.create_task(crowd(client))
        while not served.done():
            found = await samples(gateway.admin_url)
            most = max(most, total(found, RESERVED, backend=name_of(engine)))
        await served
    await gateway_holds_nothing(gateway.admin_url)
    return most
