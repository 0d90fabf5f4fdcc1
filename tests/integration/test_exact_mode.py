"""Hits that are known from the engines' KV events: of prompts given as token ids, and of chats that are tokenized."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI

from tests.integration.conftest import engine_kind
from tests.integration.fleet import CHAT_MODEL, MODELS
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, read
from tests.integration.predictions import BLOCK_TOKENS, Answered, complete, error, hit_share, talk
from tests.integration.prompts import fresh, long_prefix
from tests.integration.publishing import (
    CACHE_BLOCKS,
    Publishing,
    SimOptions,
    blocks_become,
    caught_up,
    followed,
    get,
    hit_becomes,
    in_front_of,
    post,
    real_engines,
    sent_past_the_gateway,
    simulated_engines,
    streams,
)

VOCABULARY = range(100, 400)
MOST_WRONG = 0.01  # of the prompts' tokens


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Publishing]]:
    """Two engines with small caches."""
    logs = tmp_path_factory.mktemp("publishing")
    if engine_kind(request.config) == "vllm":
        with real_engines(logs, 2) as running:
            yield list(running)
    else:
        with simulated_engines(logs, SimOptions(), SimOptions()) as simulated:
            yield list(simulated)


@pytest.fixture(scope="module")
def exact(engines: list[Publishing], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that follows their events."""
    with running_gateway(tmp_path_factory.mktemp("exact"), in_front_of(engines)) as gateway:
        yield gateway


@pytest.fixture
async def sdk(exact: Gateway, engines: list[Publishing]) -> AsyncIterator[AsyncOpenAI]:
    """A client of a gateway that knows all that both engines hold."""
    await followed(exact, len(engines))
    async with exact.client() as client:
        yield client


def ids(random: Random, blocks: int, more: int = 0) -> list[int]:
    """So many blocks of random tokens, and a part of one."""
    return random.choices(VOCABULARY, k=blocks * BLOCK_TOKENS + more)


async def emptied(engine: Publishing, gateway: Gateway) -> None:
    """Empty the engine's cache, and have it take the step with which it tells of that."""

    async def took_it() -> bool:
        answer = await post(f"{engine.url}/reset_prefix_cache")
        return answer is None or answer["success"]  # refused while something runs

    await eventually(took_it, f"{engine.name} empties its cache")
    await sent_past_the_gateway(engine, ids(Random(fresh()), 1))
    await blocks_become(gateway, engine, 1)


async def test_hits_of_token_ids_are_known_to_the_block(sdk: AsyncOpenAI) -> None:
    random = Random(31)
    systems = [ids(random, blocks) for blocks in (4, 9, 14)]
    answers = [await complete(sdk, random.choice(systems) + ids(random, 1, random.randrange(32))) for _ in range(20)]
    assert error(answers, "token ids") <= MOST_WRONG
    assert hit_share(answers) > 0.5


async def test_requests_at_once_know_of_each_other(sdk: AsyncOpenAI) -> None:
    """Events come later than the next request."""
    random = Random(32)
    answers: list[Answered] = []
    for _ in range(4):
        system = ids(random, 12)
        answers += await asyncio.gather(*(complete(sdk, system + ids(random, 1)) for _ in range(6)))
    assert error(answers, "token ids at once") <= MOST_WRONG
    assert hit_share(answers) > 0.4


async def test_what_others_sent_to_an_engine_is_known(
    sdk: AsyncOpenAI, exact: Gateway, engines: list[Publishing]
) -> None:
    random = Random(33)
    answers = []
    for engine in [*engines, *engines]:
        prompt = ids(random, 10, 20)
        await sent_past_the_gateway(engine, prompt)
        await hit_becomes(exact, engine, prompt, 10 * BLOCK_TOKENS)
        answers.append(await complete(sdk, prompt + ids(random, 1)))
        assert answers[-1].backend == engine.name
    assert error(answers, "after foreign traffic") <= MOST_WRONG
    assert hit_share(answers) > 0.8


async def test_evictions_are_known(sdk: AsyncOpenAI, exact: Gateway, engines: list[Publishing]) -> None:
    random = Random(34)
    prompts = [ids(random, random.randrange(8, 30), random.randrange(1, 32)) for _ in range(24)]
    assert sum(len(prompt) // BLOCK_TOKENS for prompt in prompts) > 2 * CACHE_BLOCKS  # they do not fit together
    for prompt in prompts:
        await complete(sdk, prompt)
    answers = []
    for _ in range(40):
        await caught_up(exact)  # an eviction that is not known yet would spoil a prediction
        answers.append(await complete(sdk, random.choice(prompts)))
    assert error(answers, "under eviction") <= MOST_WRONG
    cached = [answer.cached for answer in answers]
    assert 0 in cached
    assert max(cached) > 0
    for stream in (await streams(exact)).values():
        assert 0 < stream["resident_blocks"] <= CACHE_BLOCKS
        assert (stream["gaps"], stream["malformed"], stream["ignored_events"]) == (0, 0, 0)


async def test_a_reset_is_known(sdk: AsyncOpenAI, exact: Gateway, engines: list[Publishing]) -> None:
    random = Random(35)
    prompts = [ids(random, 8, 5) for _ in range(6)]
    for _ in range(2):
        answers = [await complete(sdk, prompt) for prompt in prompts]
    assert min(answer.cached for answer in answers) == 8 * BLOCK_TOKENS
    for engine in engines:
        await emptied(engine, exact)
    record = {each["name"]: each["prefix_record_bytes"] for each in await shown(exact)}
    assert set(record.values()) == {0}
    answers = [await complete(sdk, prompt) for prompt in prompts]
    assert [(answer.predicted, answer.cached) for answer in answers] == [(0, 0)] * len(prompts)
    answers = [await complete(sdk, prompt) for prompt in prompts]
    assert error(answers, "after a reset") <= MOST_WRONG
    assert min(answer.cached for answer in answers) == 8 * BLOCK_TOKENS


async def shown(gateway: Gateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await get(f"{gateway.admin_url}/admin/backends"))["backends"]
    return found


async def test_an_engine_that_restarts_costs_one_request_at_most_and_is_known_again_within_twenty(
    sdk: AsyncOpenAI, exact: Gateway, engines: list[Publishing]
) -> None:
    random = Random(36)
    systems = [ids(random, 10) for _ in range(4)]
    answers = await twenty_after_a_restart(sdk, exact, engines[0], systems, random)
    assert error(answers[-8:], "after a restart, own or exact") <= MOST_WRONG
    assert hit_share(answers[-8:]) > 0.5
    await followed(exact, len(engines))
    answers = [await complete(sdk, systems[turn % 4] + ids(random, 1)) for turn in range(8)]
    assert error(answers, "after a restart, exact") <= MOST_WRONG
    assert await read(exact.admin_url, "gateway_backend_prefix_trust") == len(engines)


async def twenty_after_a_restart(
    sdk: AsyncOpenAI, gateway: Gateway, engine: Publishing, systems: list[list[int]], random: Random
) -> list[Answered]:
    """Twenty answers from when the engine is back. While it is not, others answer."""

    async def ask(turn: int) -> Answered:
        return await complete(sdk, systems[turn % len(systems)] + ids(random, 1))

    for turn in range(2 * len(systems)):
        await ask(turn)
    failed = 0
    async with asyncio.TaskGroup() as group:
        restarting = group.create_task(engine.restart())
        while not restarting.done():
            try:
                await ask(random.randrange(len(systems)))
            except APIError:
                failed += 1
            await asyncio.sleep(0.1)  # a CPU that is an engine, too, has time to start the other one
    assert failed <= 1  # the one that was running there

    async def has_noticed() -> bool:
        return all(each["prefix_record_bytes"] == 0 for each in await shown(gateway) if each["name"] == engine.name)

    await eventually(has_noticed, "the gateway knows that the cache is another one")
    return [await ask(turn) for turn in range(20)]


@pytest.mark.simulated("one test that starts a real engine again is enough")
async def test_the_own_record_recovers_from_a_restart_within_twenty_requests_too(
    engines: list[Publishing], tmp_path: Path
) -> None:
    config = in_front_of(engines)
    for backend in config["backends"]:
        backend["kv_events"] = "off"
    random = Random(37)
    with running_gateway(tmp_path, config) as gateway:

        async def both_are_up() -> bool:
            return await read(gateway.admin_url, "gateway_backend_up") == len(engines)

        await eventually(both_are_up, "both engines are up")
        async with gateway.client() as client:
            systems = [ids(random, 10) for _ in range(4)]
            answers = await twenty_after_a_restart(client, gateway, engines[0], systems, random)
        assert {stream["state"] for each in await shown(gateway) for stream in each["kv_events"]} == set()
        assert await read(gateway.admin_url, "gateway_backend_prefix_trust") == len(engines)
    assert error(answers[-8:], "after a restart, own record") <= MOST_WRONG
    assert hit_share(answers[-8:]) > 0.5


async def test_chats_are_known_exactly_where_the_models_tokenizer_is(
    engines: list[Publishing], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if engine_kind(request.config) != "vllm":
        pytest.skip("simulated engines have no model's tokenizer")
    models = {CHAT_MODEL: {"tokenizer": str((MODELS / CHAT_MODEL).absolute())}}
    with running_gateway(tmp_path, in_front_of(engines, models=models)) as gateway:
        await followed(gateway, len(engines))

        async def verified() -> bool:
            return all(
                each["tokenizers"].get(CHAT_MODEL, {}).get("state") == "verified" for each in await shown(gateway)
            )

        await eventually(verified, "both engines' tokens are verified", 60.0)
        answers = []
        async with gateway.client() as client:
            for _ in range(4):
                system = {"role": "system", "content": long_prefix()[:2500]}
                for number in range(4):
                    messages = [system, {"role": "user", "content": fresh(f"Question {number}")}]
                    answers.append(await talk(client, messages, 2))
    assert error(answers, "chats") <= MOST_WRONG
    assert hit_share(answers) > 0.5
