"""Embeddings requests that are put together: each client gets what the engine itself would have answered it."""

import asyncio
import base64
import random
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.integration.conftest import StartGateway, whole_fleet_is_up
from tests.integration.fleet import EMBEDDING_MODEL, Fleet
from tests.integration.gateway_process import Gateway
from tests.integration.observed import comes_to_rest, read, samples, total

LONG_IN_TOKENS = "!" * 300  # far more tokens than its size lets expect: real engines refuse it, and say so to all
Told = tuple[int, Any, dict[str, str]]


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Told:
    async with session.post(f"{url}/v1/embeddings", json={"model": EMBEDDING_MODEL, **body}) as answer:
        return answer.status, await answer.json(), dict(answer.headers)


def vectors(document: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
    found = [entry["embedding"] for entry in document["data"]]
    assert [entry["index"] for entry in document["data"]] == list(range(len(found)))
    return np.array(
        [np.frombuffer(base64.b64decode(each), "<f4") if isinstance(each, str) else each for each in found], np.float32
    )


def check_equal(through: Told, direct: Told) -> None:
    """The same vectors in the same form, or the same error, with the code that clients know for a long input."""
    assert through[0] == direct[0], (through[1], direct[1])
    if direct[0] != 200:
        error = direct[1]["error"]
        code = "context_length_exceeded" if "maximum context length" in error["message"] else error["code"]
        assert through[1] == {"error": {**error, "code": code}}
        return
    ours, theirs = through[1], direct[1]
    assert list(ours) == list(theirs)
    assert [type(entry["embedding"]) for entry in ours["data"]] == [
        type(entry["embedding"]) for entry in theirs["data"]
    ]
    left, right = vectors(ours), vectors(theirs)
    cosines = (left * right).sum(axis=1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    assert cosines.min() > 1 - 1e-5
    if through[2]["x-gateway-usage"] == "exact":
        assert ours["usage"] == theirs["usage"]


def mixed(rng: random.Random, number: int) -> dict[str, Any]:
    """Some request: one text or several, in either form, now and then a bad one."""
    texts: list[str] = [f"Client {number}, line {place}." + " And so on." * rng.randrange(4) for place in range(8)]
    given: Any = rng.choice([texts[0], texts[:1], texts[: rng.randrange(2, 9)], [[101, 1000 + number, 102]]])
    if number % 16 == 7:
        given = rng.choice([LONG_IN_TOKENS, [*texts[:3], LONG_IN_TOKENS]])
    body: dict[str, Any] = {"input": given} | ({"user": f"u{number}"} if number % 3 else {})
    if encoding := rng.choice(["float", "base64", None]):
        body["encoding_format"] = encoding
    if number % 20 == 11:
        body["dimensions"] = 8  # which this model refuses
    return body


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_mix_of_64_clients_gets_what_each_would_have_got_alone(
    gateway: Gateway, fleet: Fleet, seed: int
) -> None:
    await whole_fleet_is_up(gateway, fleet)
    rng = random.Random(seed)
    bodies = [mixed(rng, number) for number in range(64)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        direct = [await post(session, fleet.embedding_url, body) for body in bodies]
        before = await read(gateway.admin_url, "gateway_embedding_batch_items_count")
        through = await asyncio.gather(*(post(session, gateway.url, body) for body in bodies))
    for ours, theirs in zip(through, direct, strict=True):
        check_equal(ours, theirs)
    assert await read(gateway.admin_url, "gateway_embedding_batch_items_count") - before < 48


async def test_one_bad_input_among_64_clients_fails_alone(
    gateway: Gateway, fleet: Fleet, request: pytest.FixtureRequest
) -> None:
    await whole_fleet_is_up(gateway, fleet)
    bodies = [{"input": f"Client {number}." if number != 40 else LONG_IN_TOKENS} for number in range(64)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        alone = await post(session, fleet.embedding_url, bodies[40])
        answers = await asyncio.gather(*(post(session, gateway.url, body) for body in bodies))
        usage = [await post(session, fleet.embedding_url, bodies[number]) for number in (0, 63)]
    if request.config.getoption("--engine", default="sim") == "vllm":
        assert alone[0] == 400
    check_equal(answers[40], alone)
    assert [answer[0] for number, answer in enumerate(answers) if number != 40] == [200] * 63
    for number, direct in zip((0, 63), usage, strict=True):
        check_equal(answers[number], direct)


async def test_a_long_list_comes_back_in_order_with_its_whole_usage(gateway: Gateway, fleet: Fleet) -> None:
    await whole_fleet_is_up(gateway, fleet)
    texts = [f"Line {number} of a long list." + " More." * (number % 3) for number in range(300)]
    async with aiohttp.ClientSession() as session:
        direct = await post(session, fleet.embedding_url, {"input": texts})
        through = await post(session, gateway.url, {"input": texts})
    check_equal(through, direct)
    assert through[2]["x-gateway-usage"] == "exact"


async def test_clients_that_leave_leave_nothing_behind(gateway: Gateway, fleet: Fleet) -> None:
    await whole_fleet_is_up(gateway, fleet)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(post(session, gateway.url, {"input": [f"Client {number}."] * (1 + number % 30)}))
            for number in range(48)
        ]
        await asyncio.sleep(0.01)
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, tuple) and answer[0] == 200 for answer in answers[1::2])
    await comes_to_rest(gateway.admin_url)


async def test_coalescing_can_be_turned_off_for_one_model(start_gateway: StartGateway, fleet: Fleet) -> None:
    off = {"models": {EMBEDDING_MODEL: {"embeddings": {"coalesce": False}}}}
    with start_gateway(off) as gateway:
        await whole_fleet_is_up(gateway, fleet)
        async with aiohttp.ClientSession() as session:
            answers = await asyncio.gather(*(post(session, gateway.url, {"input": f"t{n}"}) for n in range(8)))
        assert [answer[0] for answer in answers] == [200] * 8
        assert all("x-gateway-usage" not in answer[2] for answer in answers)
        assert total(await samples(gateway.admin_url), "gateway_embedding_flushes_total") == 0


async def test_an_encoder_is_not_held_to_a_kv_cache_that_it_does_not_have(gateway: Gateway, fleet: Fleet) -> None:
    await whole_fleet_is_up(gateway, fleet)
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.admin_url}/admin/backends") as answer:
        shown = (await answer.json())["backends"]
    limits = {EMBEDDING_MODEL in backend["models"]: backend["kv_tokens_limit"] for backend in shown}
    assert limits[True] is None
    assert limits[False]
