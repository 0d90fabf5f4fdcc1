"""No engine ever runs more than its cap, by its own account, and the cap is used."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import Fleet
from tests.integration.observed import (
    engines_become_idle,
    gateway_holds_nothing,
    held,
    queued_requests_become,
    samples,
    total,
)
from tests.integration.prompts import ENDLESS_TOKENS, chat

CAP = 2
REQUESTS = 12
TOKENS_EACH = 200
ENOUGH_SAMPLES = 20


async def watch(url: str, seen: list[float]) -> None:
    """Sample how many sequences an engine holds until cancelled."""
    while True:
        seen.append(await held(url))
        await asyncio.sleep(0.005)


async def run_watched(client: AsyncOpenAI, fleet: Fleet, request: dict[str, Any], count: int) -> list[float]:
    """Send a request so many times at once until every engine was seen often enough; the most that each held."""
    seen: list[list[float]] = [[] for _ in fleet.chat_urls]
    watchers = [asyncio.create_task(watch(url, each)) for url, each in zip(fleet.chat_urls, seen, strict=True)]
    try:
        while min(map(len, seen)) < ENOUGH_SAMPLES:  # an engine that is short of a core answers seldom
            fresh_ones = [{**chat(tokens=TOKENS_EACH), **request} for _ in range(count)]
            answers = await asyncio.gather(*(client.chat.completions.create(**each) for each in fresh_ones))
            tokens = TOKENS_EACH * request.get("n", 1)
            assert [answer.usage and answer.usage.completion_tokens for answer in answers] == [tokens] * count
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    return [max(each) for each in seen]


async def test_the_cap_is_shown_before_any_request_came(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({}, max_in_flight=CAP) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        found = await samples(gateway.admin_url)
        limits = {name: total(found, "gateway_backend_in_flight_limit", backend=name) for name in fleet.chat_names}
        assert limits == dict.fromkeys(fleet.chat_names, CAP)


async def test_the_cap_holds_and_is_reached(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({}, max_in_flight=CAP) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            most = await run_watched(sdk, fleet, {}, REQUESTS)
        assert most == [CAP] * len(most)
        await gateway_holds_nothing(gateway.admin_url)
    await engines_become_idle(fleet.urls)


async def test_a_request_for_several_choices_counts_as_several(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({}, max_in_flight=3) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            most = await run_watched(sdk, fleet, {"n": 2, "temperature": 1}, REQUESTS // 2)
        assert most == [2, 2], "two requests of two do not fit into three slots"
        await gateway_holds_nothing(gateway.admin_url)


@pytest.mark.simulated("how long the streams last that keep an engine busy is up to a real one")
async def test_requests_beyond_the_cap_are_served_in_the_order_they_came(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    finished: list[int] = []
    order = {"routing": {"policy": "least_loaded"}}  # under which nobody waits for a better backend meanwhile
    with start_gateway(order, max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:

            async def one(number: int) -> float:
                raw = await sdk.chat.completions.with_raw_response.create(**chat(tokens=4))
                finished.append(number)
                return float(raw.headers["x-gateway-queue-ms"])

            streams = [await sdk.chat.completions.create(**chat(tokens=ENDLESS_TOKENS), stream=True) for _ in range(2)]
            waiting_ones = []
            for number in range(5):
                waiting_ones.append(asyncio.create_task(one(number)))
                await queued_requests_become(gateway.admin_url, number + 1)
            await streams[0].close()
            waits = await asyncio.gather(*waiting_ones)
            await streams[1].close()
    assert finished == list(range(5)), "one slot serves them one after the other"
    assert all(wait > 0 for wait in waits)
