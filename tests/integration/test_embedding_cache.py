"""Cached embeddings: clients get what the engine would have answered."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI

from loadtest.servers.processes import free_ports
from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import EMBEDDING_MODEL, Fleet, simulated_engine
from tests.integration.gateway_process import running_gateway
from tests.integration.observed import eventually, read, samples, total
from tests.integration.test_embeddings import LONG_IN_TOKENS, Told, check_equal, post, vectors

CACHE: dict[str, Any] = {"embeddings": {"cache_bytes": 10_000_000}}
TEXTS = [f"Line {number} is asked for often." + " More." * (number % 4) for number in range(24)]


async def told(admin_url: str) -> dict[str, float]:
    """Inputs by where their vectors came from, and those that were sent."""
    found = await samples(admin_url)
    name = "gateway_embedding_inputs_total"
    by_source = {source: total(found, name, source=source) for source in ("computed", "cached")}
    return by_source | {"sent": total(found, "gateway_embedding_batch_items_sum")}


async def test_64_clients_with_few_texts_get_what_the_engine_would_have_answered_each_of_them(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    texts = [TEXTS[number % 8] for number in range(64)]
    with start_gateway(CACHE) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            bodies = [
                {"input": text, "encoding_format": "float" if number % 3 else "base64"}
                for number, text in enumerate(texts)
            ]
            direct = [await post(session, fleet.embedding_url, body) for body in bodies]
            for _ in range(2):
                through = await asyncio.gather(*(post(session, gateway.url, body) for body in bodies))
                for ours, theirs in zip(through, direct, strict=True):
                    check_equal(ours, theirs)
        found = await told(gateway.admin_url)
        assert found["sent"] == found["computed"]
        assert found["computed"] + found["cached"] == 128
        assert found["cached"] >= 64
        assert 8 * 384 * 4 < await read(gateway.admin_url, "gateway_embedding_cache_bytes") < 10_000_000


async def test_openais_sdk_reads_lists_of_which_a_part_is_known(start_gateway: StartGateway, fleet: Fleet) -> None:
    with start_gateway(CACHE) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with gateway.client() as sdk:
            for text in TEXTS[:8]:
                await sdk.embeddings.create(model=EMBEDDING_MODEL, input=text)
            mixed = [*TEXTS[4:12], *TEXTS[:2]]
            answers = [await sdk.embeddings.create(model=EMBEDDING_MODEL, input=mixed) for _ in range(2)]
        before = await told(gateway.admin_url)
        assert (before["computed"], before["cached"]) == (12, 6 + 10)
        async with aiohttp.ClientSession() as session:
            status, document, _ = await post(session, fleet.embedding_url, {"input": mixed})
        assert status == 200
        for answer in answers:
            assert [item.index for item in answer.data] == list(range(10))
            np.testing.assert_allclose([item.embedding for item in answer.data], vectors(document), atol=1e-5)
            assert answer.usage.prompt_tokens == document["usage"]["prompt_tokens"]
        assert [item.embedding for item in answers[0].data] == [item.embedding for item in answers[1].data]


async def test_a_known_vector_is_the_same_to_the_last_bit_in_either_form(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    with start_gateway(CACHE) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with aiohttp.ClientSession() as session:
            bodies = [{"input": TEXTS[:3], "encoding_format": name} for name in ("base64", "float", "base64")]
            answers = [await post(session, gateway.url, body) for body in bodies]
        assert [answer[2].get("x-gateway-reused-inputs") for answer in answers] == ["0", "3", "3"]
        first = vectors(answers[0][1])
        assert all(vectors(answer[1]).tobytes() == first.tobytes() for answer in answers)


async def test_a_bad_input_fails_in_the_engines_own_words_beside_cached_ones(
    start_gateway: StartGateway, fleet: Fleet
) -> None:
    inputs: list[Any] = [LONG_IN_TOKENS, LONG_IN_TOKENS, [TEXTS[0], LONG_IN_TOKENS], TEXTS[0], [TEXTS[0], TEXTS[1]]]
    with start_gateway(CACHE) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            direct: list[Told] = [await post(session, fleet.embedding_url, {"input": given}) for given in inputs]
            for _ in range(2):
                through = await asyncio.gather(*(post(session, gateway.url, {"input": given}) for given in inputs))
                for ours, theirs in zip(through, direct, strict=True):
                    check_equal(ours, theirs)


@pytest.mark.simulated("the engine is started twice")
async def test_after_a_restart_of_the_engine_nothing_is_known(tmp_path: Path) -> None:
    [port] = free_ports(1)
    flags = ("--model", EMBEDDING_MODEL, "--embedding")
    config = {"backends": [{"url": f"http://127.0.0.1:{port}"}], "health": {"probe_interval_seconds": 0.5}, **CACHE}

    async def reused(sdk: AsyncOpenAI) -> str | None:
        raw = await sdk.embeddings.with_raw_response.create(model=EMBEDDING_MODEL, input="known")
        return raw.headers.get("x-gateway-reused-inputs")

    with simulated_engine(tmp_path, *flags, port=port) as engine, running_gateway(tmp_path, config) as gateway:
        async with gateway.client() as sdk:
            assert [await reused(sdk), await reused(sdk)] == ["0", "1"]
            engine.terminate()

            async def is_down() -> bool:
                return await read(gateway.admin_url, "gateway_backend_up") == 0

            await eventually(is_down, "it is gone")
            assert await reused(sdk) == "1"
            with simulated_engine(tmp_path, *flags, port=port):

                async def is_up() -> bool:
                    return await read(gateway.admin_url, "gateway_backend_up") == 1

                await eventually(is_up, "it is back")
                assert await reused(sdk) == "0"
