"""Publishing over real sockets: numbering, gaps, replays, late and dead subscribers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from loadtest.engine.config import EngineConfig
from loadtest.engine.kv_event_publisher import KvEventPublisher, KvEventPublishers
from loadtest.engine.kv_events import KvEventsConfig
from loadtest.engine.ranks import new_publishers
from tests.unit.loadtest.engine.kv_client import Batch, kv_client

NOW = 1_700_000_000.5
EVENTS = KvEventsConfig("tcp://*:0", "tcp://*:0", topic="kv@sim")


def publishers(events: KvEventsConfig, ranks: int = 1) -> KvEventPublishers:
    made = new_publishers(EngineConfig(kv_events=events, data_parallel_size=ranks), lambda: NOW)
    assert made is not None
    return made


@pytest.fixture
async def publisher(request: pytest.FixtureRequest) -> AsyncIterator[KvEventPublisher]:
    """An open publisher; its parameter is its configuration."""
    group = publishers(getattr(request, "param", EVENTS))
    await group.open()
    try:
        yield group.by_rank[0]
    finally:
        await group.close()


def publish(publisher: KvEventPublisher, *keys: int) -> None:
    """One batch for each key."""
    for key in keys:
        publisher.log.on_removed(key)
        publisher.flush()


def keys_of(batches: list[Batch]) -> list[int]:
    return [event["block_hashes"][0] for batch in batches for event in batch.events]


async def test_batches_are_numbered_from_0_and_carry_time_rank_and_topic(publisher: KvEventPublisher) -> None:
    publish(publisher, 11, 12)
    publisher.flush()  # nothing happened: no batch
    with kv_client(publisher) as client:
        replayed = await client.replay(0)
    assert [(batch.topic, batch.seq, batch.unix_seconds, batch.rank) for batch in replayed] == [
        ("kv@sim", 0, NOW, 0),
        ("kv@sim", 1, NOW, 0),
    ]
    assert keys_of(replayed) == [11, 12]


async def test_a_late_subscriber_sees_only_what_comes(publisher: KvEventPublisher) -> None:
    publish(publisher, 11, 12)
    with kv_client(publisher) as client:
        await client.joined()
        publish(publisher, 13)
        assert keys_of(await client.until_marker()) == [13]


async def test_a_subscriber_to_another_topic_sees_nothing(publisher: KvEventPublisher) -> None:
    with kv_client(publisher, "other") as other, kv_client(publisher, "kv@") as client:
        await client.joined()
        publish(publisher, 13)
        assert keys_of(await client.until_marker()) == [13]
        assert not await other._sub.poll(0)


async def test_dropped_batches_leave_a_gap_that_a_replay_fills(publisher: KvEventPublisher) -> None:
    with kv_client(publisher) as client:
        await client.joined()
        start = publisher.next_seq
        publisher.drop_next(2)
        publish(publisher, 11, 12, 13)
        seen = await client.until_marker()
        assert [batch.seq for batch in seen] == [start + 2]
        assert keys_of(await client.replay(start))[:3] == [11, 12, 13]


async def test_a_replay_begins_where_it_is_asked_to_and_may_be_empty(publisher: KvEventPublisher) -> None:
    publish(publisher, 11, 12, 13)
    with kv_client(publisher) as client:
        assert [batch.seq for batch in await client.replay(2)] == [2]
        assert await client.replay(3) == []


@pytest.mark.parametrize("publisher", [KvEventsConfig("tcp://*:0", "tcp://*:0", buffer_steps=3)], indirect=True)
async def test_only_the_last_batches_can_be_replayed(publisher: KvEventPublisher) -> None:
    publish(publisher, 11, 12, 13, 14, 15)
    with kv_client(publisher) as client:
        assert [batch.seq for batch in await client.replay(0)] == [2, 3, 4]


async def test_a_long_replay_lets_others_be_served_between(publisher: KvEventPublisher) -> None:
    publish(publisher, *range(1, 900))
    with kv_client(publisher) as client:
        replaying = asyncio.create_task(client.replay(0))
        turns = 0
        while not replaying.done():
            await asyncio.sleep(0)
            turns += 1
        assert keys_of(replaying.result()) == [*range(1, 900)]
        assert turns > 900 // 64


async def test_a_malformed_replay_request_is_ignored(publisher: KvEventPublisher) -> None:
    with kv_client(publisher) as client:
        assert client._dealer is not None
        await client._dealer.send_multipart([b"", b"too", b"many", b"frames"])
        await client._dealer.send_multipart([b"alone"])
        assert await client.replay(0) == []


async def test_a_hung_publisher_sends_and_replays_when_it_goes_on(publisher: KvEventPublisher) -> None:
    with kv_client(publisher) as client:
        await client.joined()
        start = publisher.next_seq
        publisher.hang(True)
        publish(publisher, 11, 12)
        replaying = asyncio.create_task(client.replay(start))
        assert not await client._sub.poll(50)
        assert not replaying.done()
        publisher.hang(False)
        assert keys_of(await client.until_marker()) == [11, 12]
        assert keys_of(await replaying)[:2] == [11, 12]


async def test_without_a_replay_endpoint_there_is_none() -> None:
    group = publishers(KvEventsConfig("tcp://*:0"))
    await group.open()
    try:
        assert group.by_rank[0].source()["replay_endpoint"] is None
    finally:
        await group.close()


LARGE = KvEventsConfig("tcp://*:0", hwm=10, topic="t" * 100_000)  # more than the kernel's buffers hold


@pytest.mark.parametrize("publisher", [LARGE], indirect=True)
async def test_publishing_never_waits_for_a_subscriber_that_does_not_read(publisher: KvEventPublisher) -> None:
    context = zmq.asyncio.Context()
    dead = context.socket(zmq.SUB)
    dead.set_hwm(1)
    dead.subscribe(b"")
    dead.connect(publisher.source()["endpoint"])
    try:
        async with asyncio.timeout(5):
            while not await dead.poll(10):
                publish(publisher, 1)
        for key in range(500):
            publish(publisher, key)  # one that waited for the reader would never return
        received = 0
        while await dead.poll(100):
            await dead.recv_multipart()
            received += 1
        assert 0 < received < 500, "beyond the high-water mark batches are lost"
    finally:
        context.destroy(linger=0)


async def test_each_rank_publishes_at_a_port_of_its_own() -> None:
    group = publishers(EVENTS, ranks=2)
    await group.open()
    try:
        sources = group.sources()
        assert [*sources] == ["0", "1"]
        assert len({source["endpoint"] for source in sources.values()}) == 2
        publish(group.by_rank[1], 21)
        with kv_client(group.by_rank[1]) as client:
            [batch] = await client.replay(0)
        assert (batch.rank, batch.seq) == (1, 0)
    finally:
        await group.close()


async def test_an_address_in_use_is_an_error_that_leaves_nothing_open() -> None:
    first = publishers(EVENTS)
    await first.open()
    taken = first.sources()["0"]["replay_endpoint"]
    second = publishers(KvEventsConfig("tcp://*:0", taken))
    try:
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            await second.open()
    finally:
        await first.close()
    third = publishers(KvEventsConfig("tcp://*:0", taken))
    await third.open()
    await third.close()
