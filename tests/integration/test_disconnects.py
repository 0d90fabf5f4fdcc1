"""When a client goes away, the engine stops working for it and the slot comes back."""

import asyncio
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.observed import (
    engines_become_idle,
    eventually,
    gateway_holds_nothing,
    queued_requests_become,
    read,
    running,
)
from tests.integration.prompts import ENDLESS_TOKENS, as_json, chat, long_prefix

LONG_PREFIX_TOKENS = 500  # fewer than any tokenizer makes of it, and more than three short prompts have
ENDLESS: dict[str, Any] = {"tokens": ENDLESS_TOKENS}


async def wait_running(urls: tuple[str, ...], count: int) -> None:
    """Wait until the engines together run this many sequences."""

    async def reached() -> bool:
        return sum([await running(url) for url in urls]) == count

    await eventually(reached, f"{count} running")


async def nothing_is_held(gateway: Gateway, fleet: Fleet) -> None:
    """The engines are idle, and the gateway's own books agree."""
    await engines_become_idle(fleet.urls)
    await gateway_holds_nothing(gateway.admin_url)


async def test_a_client_that_leaves_in_the_middle_of_a_stream(
    client: AsyncOpenAI, gateway: Gateway, fleet: Fleet
) -> None:
    stream = await client.chat.completions.create(**chat(**ENDLESS), stream=True)
    for _ in range(3):
        await anext(stream)
    await wait_running(fleet.chat_urls, 1)
    await stream.close()
    await nothing_is_held(gateway, fleet)


async def test_a_client_that_leaves_while_waiting_for_a_plain_answer(
    client: AsyncOpenAI, gateway: Gateway, fleet: Fleet
) -> None:
    request = asyncio.create_task(client.chat.completions.create(**chat(**ENDLESS)))
    await wait_running(fleet.chat_urls, 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await nothing_is_held(gateway, fleet)


async def test_a_client_whose_connection_is_reset(client: AsyncOpenAI, gateway: Gateway, fleet: Fleet) -> None:
    body = as_json({**chat(**ENDLESS), "stream": True})
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{gateway.url}/v1/chat/completions", json=body)
        await answer.content.readline()
        await wait_running(fleet.chat_urls, 1)
        assert answer.connection is not None
        assert answer.connection.transport is not None
        answer.connection.transport.abort()
        answer.close()
    await nothing_is_held(gateway, fleet)


async def test_many_clients_that_leave_at_once(client: AsyncOpenAI, gateway: Gateway, fleet: Fleet) -> None:
    requests = [chat(**ENDLESS) for _ in range(12)]
    streams = [client.chat.completions.create(**request, stream=True) for request in requests[:6]]
    tasks = [asyncio.create_task(client.chat.completions.create(**request)) for request in requests[6:]]
    opened = await asyncio.gather(*streams)
    await wait_running(fleet.chat_urls, 12)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*(stream.close() for stream in opened), *tasks, return_exceptions=True)
    await nothing_is_held(gateway, fleet)


async def test_a_client_that_leaves_the_queue_is_never_sent_to_an_engine(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    prompt_tokens_before = await prompt_tokens_seen(fleet)
    with start_gateway({}, max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            streams = [await sdk.chat.completions.create(**chat(**ENDLESS), stream=True) for _ in range(2)]
            queued = asyncio.create_task(sdk.chat.completions.create(**chat(long_prefix(), **ENDLESS)))
            await queued_requests_become(gateway.admin_url, 1)
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            await queued_requests_become(gateway.admin_url, 0)
            for stream in streams:
                await stream.close()
            await nothing_is_held(gateway, fleet)
            assert (await sdk.chat.completions.create(**chat())).choices
    assert 0 < await prompt_tokens_seen(fleet) - prompt_tokens_before < LONG_PREFIX_TOKENS


async def prompt_tokens_seen(fleet: Fleet) -> float:
    """Prompt tokens that the chat engines have taken in since their start."""
    return sum([await read(url, "vllm:prompt_tokens_total") for url in fleet.chat_urls])


async def test_a_slot_given_back_by_a_leaving_client_serves_the_next_in_the_queue(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    with start_gateway({}, max_in_flight=1) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            streams = [await sdk.chat.completions.create(**chat(**ENDLESS), stream=True) for _ in range(2)]
            queued = asyncio.create_task(sdk.chat.completions.create(**chat()))
            await queued_requests_become(gateway.admin_url, 1)
            await streams[0].close()
            assert (await queued).choices
            await streams[1].close()
        await nothing_is_held(gateway, fleet)
