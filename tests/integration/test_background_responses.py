"""Responses in the background hold their slots: the cap of a backend holds for them, too."""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.observed import eventually, gateway_holds_nothing, held, read
from tests.integration.prompts import ENDLESS_TOKENS, fresh

RUNS = ("queued", "in_progress")


def request(tokens: int) -> dict[str, Any]:
    """A response of so many tokens, made in the background."""
    body = {"model": CHAT_MODEL, "input": fresh(), "max_output_tokens": tokens, "temperature": 0, "background": True}
    return {**body, "extra_body": {"ignore_eos": True}}


async def finished(sdk: AsyncOpenAI, response_id: str) -> str:
    """The status that a response ends with."""
    while (status := (await sdk.responses.retrieve(response_id)).status) in RUNS:
        await asyncio.sleep(0.05)
    return str(status)


async def test_the_cap_holds_for_responses_in_the_background(start_gateway: StartGateway, fleet: Fleet) -> None:
    most = dict.fromkeys(fleet.chat_urls, 0.0)

    async def watch() -> None:
        while True:
            for url in fleet.chat_urls:
                most[url] = max(most[url], await held(url))
            await asyncio.sleep(0.02)

    with start_gateway(max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        watching = asyncio.create_task(watch())
        async with gateway.client() as sdk:
            made = [await sdk.responses.create(**request(ENDLESS_TOKENS)) for _ in range(2)]
            waiting = [asyncio.create_task(sdk.responses.create(**request(100))) for _ in range(3)]

            async def all_are_busy() -> bool:
                queued = await read(gateway.admin_url, "gateway_queued_requests")
                return queued == 3 and list(most.values()) == [1, 1]

            await eventually(all_are_busy, "each engine runs one, and three wait")
            for response in made:
                await sdk.responses.cancel(response.id)
            ends = [await finished(sdk, (await each).id) for each in waiting]
        watching.cancel()
        await gateway_holds_nothing(gateway.admin_url)
    assert set(ends) <= {"completed", "incomplete"}
    assert list(most.values()) == [1, 1]


async def test_a_cancel_frees_the_slot_of_an_endless_one(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway(max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            first, second = [await sdk.responses.create(**request(ENDLESS_TOKENS)) for _ in range(2)]
            third = asyncio.create_task(sdk.responses.create(**request(8)))

            async def waits() -> bool:
                return await read(gateway.admin_url, "gateway_queued_requests") == 1

            await eventually(waits, "the third one waits for a slot")
            assert await read(gateway.admin_url, "gateway_background_responses") == 2
            assert (await sdk.responses.cancel(first.id)).status == "cancelled"
            assert (await third).status == "queued"
            assert (await sdk.responses.cancel(second.id)).status == "cancelled"
        await gateway_holds_nothing(gateway.admin_url)
