"""What an engine may send that it should not: the engine is followed again afterwards, and no other notices."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from gateway.core.supervisor import Supervisor
from gateway.features.exact import stream
from gateway.features.exact.events import MAX_EVENTS, MAX_PAYLOAD_BYTES
from gateway.features.exact.feed import KvEvents
from tests.unit.exact.following import prompt
from tests.unit.exact.listener import Listener, source_of, status
from tests.unit.exact.publisher import Cache, Publisher, stored

NORMAL = msgspec.msgpack.encode([1.5, Cache().serve(prompt(9)), 0])


@pytest.fixture
def listener() -> Listener:
    return Listener()


@asynccontextmanager
async def followed(listener: Listener, publisher: Publisher) -> AsyncIterator[KvEvents]:
    """Nothing of the reader may fail meanwhile."""
    supervisor = Supervisor(time.monotonic)
    async with KvEvents(listener, lambda _, rank: rank, time.monotonic, supervisor=supervisor) as events:
        events.subscribe("a", [source_of(publisher)])
        await listener.joined(publisher)
        yield events
    assert supervisor.faults == {}


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


MADE: dict[str, Callable[[], bytes]] = {
    "not msgpack": lambda: b"\xc1" * 1000,
    "empty": lambda: b"",
    "100,000 deep": lambda: b"\x91" * 100_000,
    "events 100,000 deep": lambda: b"\x92\x01" + b"\x91" * 100_000,
    "a hash of 1 MB": lambda: payload(stored([b"h" * 1_000_000], range(4), None, 4)),
    "a number of 1 MB": lambda: payload({"type": "BlockRemoved", "block_hashes": ["9" * 1_000_000]}),
    "too many events": lambda: payload(*[1] * (MAX_EVENTS + 1)),
    "unknown events": lambda: payload(*[{"type": "BlockMoved", "x": 1}] * 20_000),
    "tokens that are none": lambda: payload(stored([1], [2**63], None, 1)),
    "blocks of no tokens": lambda: payload(stored([1], [], None, 0)),
    "extra keys that nest": lambda: payload({**stored([1], range(4), None, 4), "extra_keys": [[[]] * 500_000]}),
    "a salt of 1 MB": lambda: payload({**stored([1], range(4), None, 4), "extra_keys": [["s" * 1_000_000]]}),
    "as large as may be": lambda: payload(stored([1], [1] * (MAX_PAYLOAD_BYTES - 300), None, 4)),
}


@pytest.mark.parametrize("name", MADE)
async def test_after_a_hostile_payload_the_engine_is_followed_again(name: str, listener: Listener) -> None:
    with Publisher() as publisher:
        async with followed(listener, publisher) as events:
            publisher.publish(*Cache().serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
            publisher.publish_payload(MADE[name]())
            publisher.publish(*Cache().serve(prompt(2)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            assert status(events)["state"] == "live"


async def test_after_a_message_that_is_too_large_the_engine_is_followed_again(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq ends the connection, and makes no other by itself."""
    monkeypatch.setattr(stream, "REOPEN_SECONDS", 0.3)
    monkeypatch.setattr(stream, "REPLAY_PATIENCE_SECONDS", 0.3)
    with Publisher() as publisher:
        async with followed(listener, publisher) as events:
            publisher.publish(*Cache().serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
            publisher.publish_payload(bytes(MAX_PAYLOAD_BYTES + 1))
            await listener.until(lambda: listener.states[0] == (False, False))
            await asyncio.to_thread(publisher.wait_for_subscriber)
            await listener.until(lambda: listener.states[0][0])
            publisher.publish(*Cache().serve(prompt(2)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            assert status(events)["state"] == "live"


@pytest.mark.parametrize("sequence", [2**64 - 1, 0, 2**63, 5])
async def test_whatever_number_a_message_has_those_that_follow_are_used(sequence: int, listener: Listener) -> None:
    with Publisher() as publisher:
        async with followed(listener, publisher) as events:
            for number in range(3):
                publisher.publish(*Cache().serve(prompt(number)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            publisher.send_frames(b"kv@test", sequence.to_bytes(8, "big"), NORMAL)
            publisher.publish(*Cache().serve(prompt(4)))
            await listener.until(lambda: listener.depth(prompt(4)) == 5)
            await listener.until(lambda: status(events)["state"] == "live")


async def test_frames_that_are_no_message_are_passed_over(listener: Listener) -> None:
    with Publisher() as publisher:
        async with followed(listener, publisher) as events:
            for frames in ((b"kv@test",), (b"kv@test", b"1", NORMAL), (b"kv@test", *[b""] * 1000)):
                publisher.send_frames(*frames)
            publisher.publish(*Cache().serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
            assert status(events)["malformed"] == 3


async def test_a_flood_is_followed_to_its_end(listener: Listener) -> None:
    cache = Cache(capacity=500)
    with Publisher() as publisher:
        async with followed(listener, publisher):
            for number in range(5000):
                publisher.publish(*cache.serve(prompt(number)))
            await listener.until(lambda: listener.depth(prompt(4999)) == 5)
    assert listener.largest_update <= 1024
