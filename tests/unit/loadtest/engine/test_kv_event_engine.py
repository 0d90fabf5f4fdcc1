"""A simulated engine publishes over real sockets what its prefix cache holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import zmq

from gateway.core.backends.vllm_api import read_kv_event_sources
from loadtest.engine import EngineConfig, Limits, SimulatedEngine
from loadtest.engine.kv_event_publisher import long_hash
from loadtest.engine.kv_events import Encoding, HashFormat, KvEventsConfig
from tests.unit.loadtest.engine.kv_client import Batch, KvClient, Mirror, kv_client
from tests.unit.loadtest.engine.support import eventually, idle

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=2048, block_size=16, num_blocks=40)
EVENTS = KvEventsConfig("tcp://*:0", "tcp://*:0", topic="kv@sim")
CONFIG = EngineConfig(
    limits=LIMITS, time_scale=0, max_model_len=600, control=True, lora_adapters=("other", "adapter"), kv_events=EVENTS
)
PATH = "/v1/chat/completions"


@pytest.fixture
async def publishing(request: pytest.FixtureRequest) -> AsyncIterator[SimulatedEngine]:
    """A fast engine with a small cache that publishes; its parameter is its configuration."""
    async with SimulatedEngine(getattr(request, "param", CONFIG), seed=1) as running:
        yield running


@pytest.fixture
async def client(publishing: SimulatedEngine) -> AsyncIterator[KvClient]:
    """A subscriber to the first rank that has missed nothing but markers."""
    assert publishing.service.kv_events is not None
    with kv_client(publishing.service.kv_events.by_rank[0]) as subscribed:
        yield await subscribed.joined()


async def chat(http: aiohttp.ClientSession, engine: SimulatedEngine, text: str, rank: int = 0, **body: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "ignore_eos": True, **body}
    async with http.post(engine.url + PATH, json=body, headers={"X-data-parallel-rank": str(rank)}) as answer:
        assert answer.status == 200
        return await answer.json()


async def set_faults(http: aiohttp.ClientSession, engine: SimulatedEngine, **faults: Any) -> int:
    async with http.post(f"{engine.url}/sim/faults", json=faults) as answer:
        return answer.status


def kinds(batches: list[Batch]) -> list[list[str]]:
    return [[event["type"] for event in batch.events] for batch in batches]


@pytest.mark.parametrize(
    "publishing",
    [
        replace(CONFIG, kv_events=replace(EVENTS, encoding=encoding, hashes=hashes), data_parallel_size=2)
        for encoding in Encoding
        for hashes in HashFormat
    ],
    indirect=True,
    ids=lambda config: f"{config.kv_events.encoding}-{config.kv_events.hashes}",
)
async def test_following_all_events_yields_the_keys_that_each_rank_has_cached(
    http: aiohttp.ClientSession, publishing: SimulatedEngine
) -> None:
    group, config = publishing.service.kv_events, publishing.config.kv_events
    assert group is not None
    assert config is not None
    with ExitStack() as stack:
        clients = [await stack.enter_context(kv_client(publisher)).joined() for publisher in group.by_rank]
        mirrors = [Mirror(), Mirror()]
        for round_number in range(3):
            await asyncio.gather(
                *(chat(http, publishing, f"{n % 3} " * (40 + 8 * n) + str(round_number), rank=n % 2) for n in range(8)),
                chat(http, publishing, "salted " * 40, cache_salt="tenant"),
                chat(http, publishing, "adapted " * 40, model="adapter"),
            )
            for rank, follower in enumerate(clients):
                for batch in await follower.until_marker():
                    assert (batch.rank, batch.topic) == (rank, "kv@sim")
                    mirrors[rank].apply(batch)
                keys = publishing.service.engine.ranks[rank].scheduler.pool.cached_keys()
                reported = {long_hash(k): n for k, n in keys.items()} if config.hashes is HashFormat.BYTES else keys
                assert mirrors[rank].copies == reported
        pools = [rank.scheduler.pool for rank in publishing.service.engine.ranks]
        assert all(0 < pool.num_cached <= LIMITS.num_blocks for pool in pools)


async def test_a_chat_is_reported_block_by_block_as_it_grows(
    http: aiohttp.ClientSession, publishing: SimulatedEngine, client: KvClient
) -> None:
    answer = await chat(http, publishing, "w" * 200, return_token_ids=True)
    batches = await client.until_marker()
    assert kinds(batches) == [["BlockStored"]] * 3
    events = [batch.events[0] for batch in batches]
    tokens = [token for event in events for token in event["token_ids"]]
    ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    assert tokens == ids[: len(tokens)]
    assert len(tokens) == (len(ids) - 1) // 16 * 16, "all but the token that was never computed"
    assert [event.get("parent_block_hash") for event in events] == [
        None,
        *(event["block_hashes"][-1] for event in events[:-1]),
    ]


async def test_salt_adapter_and_session_are_named(
    http: aiohttp.ClientSession, publishing: SimulatedEngine, client: KvClient
) -> None:
    await chat(http, publishing, "w" * 150, max_tokens=1, cache_salt="tenant", model="adapter", session_id="s")
    [batch] = await client.until_marker()
    [event] = batch.events
    assert event["extra_keys"] == [["adapter", "tenant"], ["adapter"], ["adapter"]]
    assert (event["lora_name"], event["lora_id"], event["session_id"]) == ("adapter", 2, "s")


async def test_hits_are_reported_on_request(
    http: aiohttp.ClientSession, publishing: SimulatedEngine, client: KvClient
) -> None:
    await chat(http, publishing, "w" * 150, max_tokens=1)
    [stored] = await client.until_marker()
    await chat(http, publishing, "w" * 150, max_tokens=1)
    assert await client.until_marker() == []
    await chat(http, publishing, "w" * 150, max_tokens=1, vllm_xargs={"kv_cache_report_mode": "full"})
    [reported] = await client.until_marker()
    assert reported.events == stored.events


async def test_a_reset_is_reported_with_the_next_step(
    http: aiohttp.ClientSession, publishing: SimulatedEngine, client: KvClient
) -> None:
    await chat(http, publishing, "w" * 150, max_tokens=1)
    await client.until_marker()
    async with http.post(f"{publishing.url}/reset_prefix_cache") as answer:
        assert answer.status == 200
    assert not await client._sub.poll(50)
    await chat(http, publishing, "w" * 150, max_tokens=1)
    assert kinds(await client.until_marker()) == [["AllBlocksCleared", "BlockStored"]]


async def test_an_aborted_stream_has_reported_the_blocks_that_it_filled(
    http: aiohttp.ClientSession, publishing: SimulatedEngine, client: KvClient
) -> None:
    await set_faults(http, publishing, script={"stall_at_token": 20})
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with http.post(publishing.url + PATH, json=body) as answer:
        await answer.content.readuntil(b"\n\n")
    await eventually(lambda: idle(publishing))
    mirror = Mirror()
    for batch in await client.until_marker():
        mirror.apply(batch)
    assert mirror.copies == publishing.service.engine.ranks[0].scheduler.pool.cached_keys()


async def test_dropped_batches_can_be_replayed(
    http: aiohttp.ClientSession, publishing: SimulatedEngine, client: KvClient
) -> None:
    start = client.publisher.next_seq
    assert await set_faults(http, publishing, kv_events_drop_batches=2) == 200
    await chat(http, publishing, "w" * 200)
    assert [batch.seq for batch in await client.until_marker()] == [start + 2]
    assert [batch.seq for batch in await client.replay(start)][:3] == [start, start + 1, start + 2]


async def test_a_hung_publisher_does_not_hang_the_engine(
    http: aiohttp.ClientSession, publishing: SimulatedEngine, client: KvClient
) -> None:
    assert await set_faults(http, publishing, kv_events_hang=True) == 200
    await chat(http, publishing, "w" * 200)
    assert not await client._sub.poll(50)
    assert await set_faults(http, publishing) == 200
    assert len(await client.until_marker()) == 3


async def test_an_engine_without_events_has_no_sources_and_no_such_faults(
    http: aiohttp.ClientSession, engine: SimulatedEngine
) -> None:
    async with http.get(f"{engine.url}/kv_event_sources") as answer:
        assert await answer.json() == {}
    assert await set_faults(http, engine, kv_events_hang=True) == 400
    assert await set_faults(http, engine, kv_events_drop_batches=1) == 400


@pytest.mark.parametrize("publishing", [replace(CONFIG, data_parallel_size=2)], indirect=True)
async def test_the_sources_are_what_the_gateway_reads(http: aiohttp.ClientSession, publishing: SimulatedEngine) -> None:
    async with http.get(f"{publishing.url}/kv_event_sources") as answer:
        first, second = read_kv_event_sources(await answer.json())
    assert (first.rank, second.rank) == (0, 1)
    assert (first.publisher, first.topic) == ("zmq", "kv@sim")
    endpoints = {first.endpoint, first.replay_endpoint, second.endpoint, second.replay_endpoint}
    assert len(endpoints) == 4
    assert all(endpoint is not None and endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints)


async def test_an_embedding_engine_has_nothing_to_report(http: aiohttp.ClientSession) -> None:
    async with SimulatedEngine(replace(CONFIG, embedding=True), seed=1) as embedder:
        async with http.post(f"{embedder.url}/v1/embeddings", json={"input": "w" * 400}) as answer:
            assert answer.status == 200
        assert embedder.service.kv_events is not None
        assert embedder.service.kv_events.by_rank[0].next_seq == 0


async def test_an_address_in_use_keeps_the_engine_from_starting(publishing: SimulatedEngine) -> None:
    assert publishing.service.kv_events is not None
    taken = publishing.service.kv_events.sources()["0"]["replay_endpoint"]
    second = SimulatedEngine(replace(CONFIG, kv_events=replace(EVENTS, replay_endpoint=taken)))
    with pytest.raises(zmq.ZMQError, match="Address already in use"):
        await second.start()
    await second.stop()
