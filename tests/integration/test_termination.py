"""An engine is told to stop while it answers: real ones end answers with an error, as if complete, or not at all."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from loadtest.servers.server import Server
from tests.integration.fleet import Fleet, name_of
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, gateway_holds_nothing, read, running
from tests.integration.prompts import ENDLESS_TOKENS, chat

ENDING_SECONDS = 40.0  # an engine may leave its connections open and silent until the gateway gives it up
RETRIED_TOKENS = 400


async def stream_from(client: AsyncOpenAI, backend: str) -> AsyncStream[ChatCompletionChunk]:
    """A stream that this backend answers."""
    while True:
        raw = await client.chat.completions.with_raw_response.create(**chat(tokens=ENDLESS_TOKENS), stream=True)
        stream: AsyncStream[ChatCompletionChunk] = raw.parse()
        if raw.headers["x-gateway-backend"] == backend:
            return stream
        await stream.close()


async def plain_on(client: AsyncOpenAI, spare: Server, already_running: int) -> "asyncio.Task[ChatCompletion]":
    """A request for a plain answer that the spare engine works on."""

    async def arrived() -> bool:
        return await running(spare.url) > already_running

    while True:
        task = asyncio.create_task(client.chat.completions.create(**chat(tokens=RETRIED_TOKENS)))
        try:
            await eventually(arrived, "the request runs on the spare engine", 0.5)
        except AssertionError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            return task


async def finish_reasons(stream: AsyncStream[ChatCompletionChunk]) -> list[Any]:
    """Read a stream to its end."""
    return [choice.finish_reason async for chunk in stream for choice in chunk.choices]


@pytest.fixture
def two_backends(fleet: Fleet, spare: Server) -> dict[str, Any]:
    """A configuration with a chat engine that stays and one that will go."""
    backends = [{"url": spare.url}, {"url": fleet.chat_urls[0]}]
    return {"backends": backends, "routing": {"policy": "round_robin"}}


async def both_up(gateway: Gateway) -> None:
    """Wait until the gateway uses both backends."""

    async def up() -> bool:
        return await read(gateway.admin_url, "gateway_backend_up") == 2

    await eventually(up, "both backends are up")


async def test_a_stream_never_looks_complete_and_a_plain_answer_comes_from_elsewhere(
    two_backends: dict[str, Any], fleet: Fleet, spare: Server, tmp_path: Path
) -> None:
    with running_gateway(tmp_path, two_backends) as gateway:
        await both_up(gateway)
        async with gateway.client() as sdk:
            stream = await stream_from(sdk, name_of(spare))
            plain = await plain_on(sdk, spare, already_running=1)
            spare.terminate()
            async with asyncio.timeout(ENDING_SECONDS):
                with pytest.raises(APIError):
                    await finish_reasons(stream)
                answer = await plain
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == RETRIED_TOKENS
            for _ in range(4):
                assert (await sdk.chat.completions.create(**chat())).choices, "the other engine serves on"
        await gateway_holds_nothing(gateway.admin_url)
        assert await read(gateway.admin_url, "gateway_requests_total", outcome="interrupted") == 1
