"""Where requests go, and what that saves; with the own record, or without any."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import CHAT_FLAGS, CHAT_MODEL, Fleet, name_of, simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, read
from tests.integration.predictions import BLOCK_TOKENS, Answered, complete, talk, text
from tests.integration.prompts import chat, fresh, long_prefix
from tests.integration.publishing import get

ADAPTER = "poet"
KEYS = [{"name": name, "key": f"sk-{name}"} for name in ("ann", "bob")]


async def test_the_hits_that_are_counted_are_those_that_clients_see(client: AsyncOpenAI, gateway: Gateway) -> None:
    async def counted() -> float:
        return await read(gateway.admin_url, "gateway_prefix_hit_tokens_total", kind="actual")

    before = await counted()
    prefixes = [long_prefix() for _ in range(3)]
    answers = [await complete(client, prefix + fresh()) for _ in range(4) for prefix in prefixes]
    assert await counted() - before == sum(answer.cached for answer in answers) > 0


@asynccontextmanager
async def clients_with_keys(start_gateway: StartGateway, fleet: Fleet) -> AsyncIterator[tuple[AsyncOpenAI, ...]]:
    """Ann, and Bob."""
    with start_gateway({"auth": {"keys": KEYS}}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client("sk-ann") as ann, gateway.client("sk-bob") as bob:
            yield ann, bob


@pytest.mark.parametrize("name", ["prompt_cache_key", "X-Session-ID"])
async def test_a_hint_keeps_requests_together_that_share_nothing(
    start_gateway: StartGateway, fleet: Fleet, name: str
) -> None:
    """Without it, the engine that was chosen less often is taken, when neither has anything to do."""

    async def goes_to(sdk: AsyncOpenAI, hint: str | None) -> str:
        wish: dict[str, Any] = {"extra_headers": {name: hint}} if name.startswith("X-") else {name: hint}
        request = chat(fresh("x" * 2000), 1, **(wish if hint else {}))
        answer = await sdk.chat.completions.with_raw_response.create(**request)
        return str(answer.headers["x-gateway-backend"])

    async with clients_with_keys(start_gateway, fleet) as (ann, bob):
        first = await goes_to(ann, "task-1")
        assert [await goes_to(ann, "task-1") for _ in range(3)] == [first] * 3
        [other] = fleet.chat_names - {first}
        assert await goes_to(ann, None) == other
        assert await goes_to(bob, "task-1") == other  # another client's key, though it is spelled alike
        assert await goes_to(ann, "task-1") == first
        assert await goes_to(bob, "task-1") == other


@pytest.mark.parametrize("shows_text", [False, True])
async def test_the_prefix_report_finds_the_time_at_the_top_of_a_system_prompt(
    start_gateway: StartGateway, fleet: Fleet, shows_text: bool
) -> None:
    rules = text(Random(61), 3300)
    with start_gateway({"prefix_report": {"show_text": shows_text}}) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            for minute in range(12):
                system = f"It is 2026-11-21 10:{minute:02d}:00. {rules}"
                question = fresh("What now?")
                await talk(
                    sdk, [{"role": "system", "content": system}, {"role": "user", "content": question}], tokens=1
                )
        report = await get(f"{gateway.admin_url}/admin/prefixes")
        told = subprocess.run(
            [sys.executable, "-m", "gateway", "prefixes", gateway.admin_url], capture_output=True, text=True
        )
    breaker = report["breakers"][0]
    assert (breaker["kind"], breaker["part"]) == ("timestamp", "messages[0] (system)")
    assert breaker["part_offset_bytes"] < 30
    assert breaker["saved_tokens_per_request"] > 400
    assert breaker["clients"] == [""]
    assert report["totals"]["since_start"]["requests"] == 12
    assert told.returncode == 0, told.stderr
    assert "timestamp in messages[0] (system)" in told.stdout
    for shown in (json.dumps(report), told.stdout):
        assert ("10:0" in shown) == shows_text
        assert shows_text or not any(word in shown for word in (rules[:32], rules[200:220], "What now"))


@pytest.mark.simulated("the real models have no adapters")
async def test_requests_for_an_adapter_go_to_the_engine_that_has_it(tmp_path: Path) -> None:
    with (
        simulated_engine(tmp_path, *CHAT_FLAGS, "--lora", ADAPTER) as poetic,
        simulated_engine(tmp_path, *CHAT_FLAGS) as plain,
        running_gateway(tmp_path, {"backends": [{"url": engine.url} for engine in (poetic, plain)]}) as gateway,
    ):

        async def both_are_up() -> bool:
            return await read(gateway.admin_url, "gateway_backend_up") == 2

        await eventually(both_are_up, "both engines are up")
        async with gateway.client() as sdk:
            prefix = long_prefix()

            async def ask(model: str) -> Answered:
                return await complete(sdk, prefix + fresh(), model=model)

            in_verse = [await ask(ADAPTER) for _ in range(4)]
            in_prose = [await ask(CHAT_MODEL) for _ in range(6)]
            again = await ask(ADAPTER)
    assert {answer.backend for answer in [*in_verse, again]} == {name_of(poetic)}
    assert [answer.cached > 0 for answer in in_verse] == [False, True, True, True]
    assert (in_prose[0].predicted, in_prose[0].cached) == (0, 0)  # the adapter's blocks are of no use to the model
    for answer in [*in_verse, *in_prose, again]:
        assert answer.is_right
    assert again.cached >= in_verse[-1].cached - BLOCK_TOKENS
