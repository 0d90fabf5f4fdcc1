"""Tenants, classes and deadlines, from a client's header to the order in which engines are had."""

import asyncio
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, RateLimitError

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import CHAT_MODEL, Fleet
from tests.integration.observed import gateway_holds_nothing, queued_requests_become
from tests.integration.prompts import ENDLESS_TOKENS, chat

SECTIONS = {
    "admission": {"tenant_header": "X-User"},
    "routing": {"policy": "least_loaded"},  # under which nobody waits for a better backend while others overtake
}


async def fill(client: AsyncOpenAI, engines: int) -> list[Any]:
    """Take every slot of engines with one slot each."""
    return [await client.chat.completions.create(**chat(tokens=ENDLESS_TOKENS), stream=True) for _ in range(engines)]


async def test_a_tenant_that_comes_last_is_served_next_and_batch_requests_are_served_last(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    finished: list[str] = []
    order = ["a1", "a2", "a3", "B1", "b2"]  # capital: batch
    with start_gateway(SECTIONS, max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk, aiohttp.ClientSession() as session:

            async def one(name: str) -> None:
                headers = {"X-User": name[0].lower()}
                if name[0].isupper():
                    headers["X-Gateway-Priority"] = "batch"
                await sdk.chat.completions.create(**chat(tokens=4), extra_headers=headers)
                finished.append(name)

            streams = await fill(sdk, len(fleet.chat_urls))
            waiting = []
            for number, name in enumerate(order):
                waiting.append(asyncio.create_task(one(name)))
                await queued_requests_become(gateway.admin_url, number + 1)
            async with session.get(f"{gateway.admin_url}/admin/queue") as response:
                shown = await response.json()
            await streams[0].close()
            await asyncio.gather(*waiting)
            await streams[1].close()
        await gateway_holds_nothing(gateway.admin_url)
    assert finished == ["a1", "b2", "a2", "a3", "B1"]
    [line] = [model for model in shown["models"] if model["model"] == CHAT_MODEL]
    counts = {
        (tenant["tenant"], each["class"]): each["waiting"] for tenant in line["tenants"] for each in tenant["classes"]
    }
    assert counts == {("a", "interactive"): 3, ("b", "interactive"): 1, ("b", "batch"): 1, ("", "interactive"): 0}


async def test_a_deadline_that_cannot_be_met_is_told_before_the_longest_wait(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    with start_gateway({}, max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            streams = await fill(sdk, len(fleet.chat_urls))
            with pytest.raises(RateLimitError) as refused:
                await sdk.chat.completions.create(**chat(), extra_headers={"X-Gateway-Deadline-Ms": "200"})
            for stream in streams:
                await stream.close()
        await gateway_holds_nothing(gateway.admin_url)
    assert refused.value.code == "deadline_exceeded"
    assert refused.value.response.headers["x-should-retry"] == "false"


async def test_the_time_out_of_the_sdk_is_a_deadline(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway({}, max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk, gateway.client(timeout=20.0) as hurried:
            streams = await fill(sdk, len(fleet.chat_urls))
            tokens = 900_000  # whose prefill alone takes longer than that, by what is known of engines at the start
            with pytest.raises(RateLimitError) as refused:
                await hurried.chat.completions.create(**chat("word " * tokens, tokens=1))
            for stream in streams:
                await stream.close()
    assert refused.value.code == "deadline_exceeded"


@pytest.mark.parametrize(("name", "value"), [("X-Gateway-Priority", "urgent"), ("X-Gateway-Deadline-Ms", "soon")])
async def test_a_header_with_a_value_that_means_nothing_is_refused(client: AsyncOpenAI, name: str, value: str) -> None:
    with pytest.raises(BadRequestError, match=name):
        await client.chat.completions.create(**chat(), extra_headers={name: value})
