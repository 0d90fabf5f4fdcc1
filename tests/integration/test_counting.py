"""What the gateway counts and learns is the same on every endpoint, streamed or whole, and what the engines counted."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import CHAT_FLAGS, CHAT_MODEL, Fleet, simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, read
from tests.integration.prompts import fresh, long_prefix

TOKENS = 8


def _body(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    fields: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": TOKENS},
        "/v1/completions": {"prompt": prompt, "max_tokens": TOKENS},
        "/v1/messages": {"messages": messages, "max_tokens": TOKENS},
        "/v1/responses": {"input": prompt, "max_output_tokens": TOKENS},
    }
    return {"model": CHAT_MODEL, "temperature": 0, **fields[path], **more}


PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])


async def _send(gateway: Gateway, path: str, prompt: str, **more: Any) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}{path}", json=_body(path, prompt, **more)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        await answer.read()


async def _counted_by_engines(fleet: Fleet) -> tuple[float, float, float]:
    """Tokens of prompts, those of them that were cached, and tokens of answers."""
    names = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:generation_tokens_total"
    prompt, cached, output = [sum([await read(url, name) for url in fleet.chat_urls]) for name in names]
    return prompt, cached, output


async def _counted(gateway: Gateway) -> tuple[float, float, float]:
    """The same, by the gateway."""
    url = gateway.admin_url
    return (
        await read(url, "gateway_prompt_tokens_total"),
        await read(url, "gateway_prefix_hit_tokens_total", kind="actual"),
        await read(url, "gateway_completion_tokens_total"),
    )


@PATHS
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_what_the_engine_counted_with_a_cold_and_with_a_warm_cache(
    start_gateway: StartGateway, fleet: Fleet, path: str, stream: bool
) -> None:
    prompt = long_prefix()
    with start_gateway({}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        before = await _counted_by_engines(fleet)
        for number in range(1, 4):
            await _send(gateway, path, prompt, stream=stream)

            async def agree() -> bool:
                after = await _counted_by_engines(fleet)
                return await _counted(gateway) == tuple(b - a for a, b in zip(before, after, strict=True))

            async def requests_counted(number: int = number) -> bool:
                return await read(gateway.admin_url, "gateway_requests_total", outcome="completed") == number

            await eventually(requests_counted, f"{number} requests counted")
            await eventually(agree, "the gateway's and the engines' counts agree")
        prompt_tokens, cached_tokens, output_tokens = await _counted(gateway)
    assert cached_tokens > prompt_tokens / 2  # two of three were warm
    assert 0 < output_tokens <= 3 * TOKENS


async def _signed(url: str, path: str, **more: Any) -> list[tuple[bool, bool]]:
    """Of the events of a stream that end it or have a fingerprint: whether they do either."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{path}", json=_body(path, fresh(), stream=True, **more)) as answer,
    ):
        events = (await answer.read()).split(b"\n\n")
    found = [(b'"finish_reason":"' in event, b'"system_fingerprint"' in event) for event in events]
    return [each for each in found if any(each)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": True}])
async def test_the_fingerprint_is_where_the_engine_would_have_put_it(
    gateway: Gateway, fleet: Fleet, path: str, options: dict[str, bool]
) -> None:
    await whole_fleet_is_up(gateway, fleet)
    more = {"stream_options": options} if options else {}
    directly = await _signed(fleet.chat_urls[0], path, **more)
    assert any(is_signed for _, is_signed in directly)
    assert await _signed(gateway.url, path, **more) == directly


@pytest.mark.simulated("the engine's speed must be known")
async def test_the_cost_of_a_prefill_is_learned_alike_on_every_endpoint(tmp_path: Path) -> None:
    learned: dict[str, float] = {}
    flags = (*CHAT_FLAGS, "--time-scale", "8")  # its own time is longer than that of the machine
    with simulated_engine(tmp_path, *flags) as engine:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
            with running_gateway(tmp_path, {"backends": [{"url": engine.url}]}) as gateway:
                for _ in range(6):
                    await _send(gateway, path, fresh("a b c d " * 1000), stream=True)
                learned[path] = await read(gateway.admin_url, "gateway_prefill_seconds_per_token")
    lowest, highest = min(learned.values()), max(learned.values())
    assert 0 < highest <= 2 * lowest, learned
