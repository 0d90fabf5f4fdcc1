"""Prompts that share a prefix meet where its KV cache is, as the engines' own counts show."""

import asyncio

from openai import AsyncOpenAI

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.observed import read
from tests.integration.prompts import chat, long_prefix

CONVERSATIONS = 5  # odd, or round robin over two backends would keep each conversation in place
TURNS = 4


async def ask(client: AsyncOpenAI, content: str) -> tuple[str, int, int]:
    """The backend that answered, the tokens it found cached, and the tokens the gateway had predicted."""
    raw = await client.chat.completions.with_raw_response.create(**chat(content, tokens=2))
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return raw.headers["x-gateway-backend"], cached, int(raw.headers["x-gateway-prefix-tokens"])


async def total_cached(gateway: Gateway, fleet: Fleet) -> int:
    """Cached tokens of several conversations, whose turns alternate."""
    await whole_fleet_is_up(gateway, fleet)
    prefixes = [long_prefix() for _ in range(CONVERSATIONS)]
    async with gateway.client() as sdk:
        answers = [await ask(sdk, f"{prefix} Turn {turn}.") for turn in range(TURNS) for prefix in prefixes]
    return sum(cached for _, cached, _ in answers)


async def test_two_prompts_with_a_long_shared_prefix_land_on_one_backend(client: AsyncOpenAI) -> None:
    prefix = long_prefix()
    first_backend, first_cached, first_predicted = await ask(client, f"{prefix} What is the first word?")
    second_backend, second_cached, second_predicted = await ask(client, f"{prefix} And the last one?")
    assert second_backend == first_backend
    assert (first_cached, first_predicted) == (0, 0)
    assert second_cached > 0
    assert abs(second_predicted - second_cached) < 0.5 * second_cached


async def test_prefix_routing_finds_more_in_the_caches_than_round_robin(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    async def hits_seen_by_engines() -> float:
        return sum([await read(url, "vllm:prefix_cache_hits_total") for url in fleet.chat_urls])

    before = await hits_seen_by_engines()
    with start_gateway({"routing": {"policy": "prefix"}}) as gateway:
        with_prefix = await total_cached(gateway, fleet)
    assert await hits_seen_by_engines() - before == with_prefix
    with start_gateway({"routing": {"policy": "round_robin"}}) as gateway:
        with_round_robin = await total_cached(gateway, fleet)
    assert with_prefix > with_round_robin > 0


async def test_round_robin_alternates(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({"routing": {"policy": "round_robin"}}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            backends = [(await ask(sdk, long_prefix()))[0] for _ in range(4)]
    assert backends[0] != backends[1]
    assert backends == backends[:2] * 2


async def test_unrelated_prompts_at_once_use_both_backends(client: AsyncOpenAI, fleet: Fleet) -> None:
    answers = await asyncio.gather(*(ask(client, long_prefix()) for _ in range(8)))
    backends = [backend for backend, _, _ in answers]
    assert {backends.count(name) for name in fleet.chat_names} == {4}
