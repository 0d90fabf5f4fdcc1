import asyncio
import time
from typing import Any

import pytest

from gateway.features.exact.endpoints import Source
from gateway.features.exact.feed import KvEvents
from tests.unit.exact.following import following, prompt
from tests.unit.exact.listener import Listener, source_of, status
from tests.unit.exact.publisher import Cache, Publisher

NOWHERE = Source(0, "tcp://127.0.0.1:9", None)


@pytest.fixture
def listener() -> Listener:
    return Listener()


async def test_engines_of_several_backends_are_followed_under_their_numbers(listener: Listener) -> None:
    numbers = {("a", 0): 3, ("a", 1): 1, ("b", 0): 0}
    with Publisher() as first, Publisher() as second, Publisher() as third:
        for publisher, number in ((first, 0), (second, 1), (third, 2)):
            publisher.publish(*Cache().serve(prompt(number)))
        async with KvEvents(listener, lambda *engine: numbers.get(engine), time.monotonic) as events:
            events.subscribe("a", [source_of(first), source_of(second, rank=1), source_of(third, rank=7)])
            events.subscribe("b", [source_of(third)])
            for engine in (0, 1, 3):
                await listener.until_live(engine)
            assert [listener.depth(prompt(0), engine=engine) for engine in (0, 1, 3)] == [0, 0, 5]
            assert [listener.depth(prompt(1), engine=engine) for engine in (0, 1, 3)] == [0, 5, 0]
            assert [listener.depth(prompt(2), engine=engine) for engine in (0, 1, 3)] == [5, 0, 0]
            seen = [(entry["engine"], entry["backend"], entry["rank"]) for entry in events.status()]
    assert seen == [(0, "b", 0), (1, "a", 1), (3, "a", 0)]


async def test_following_the_same_again_disturbs_nothing(listener: Listener) -> None:
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            for tokens in (None, 100, 200):
                source = source_of(publisher)
                events.subscribe(
                    "a",
                    [Source(0, source.endpoint, source.replay, topic=source.topic, bind=False, capacity_tokens=tokens)],
                )
            publisher.publish(*Cache().serve(prompt(0)))
            await listener.until(lambda: listener.depth(prompt(0)) == 5)
            assert status(events)["repairs"] == 1
            assert listener.calls == ["state True True", "changed"]


async def test_a_backend_that_is_forgotten_is_cleared(listener: Listener) -> None:
    with Publisher() as publisher:
        publisher.publish(*Cache().serve(prompt(0)))
        async with following(listener, source_of(publisher)) as events:
            await listener.until_live()
            events.subscribe("a", [])
            await listener.until(lambda: len(listener.index) == 0)
            assert listener.states == {0: (False, False)}
            assert events.status() == []
            events.subscribe("a", [source_of(publisher)])
            await listener.until_live()
            assert listener.depth(prompt(0)) == 5


async def test_what_was_asked_for_before_the_start_is_followed_from_the_start(listener: Listener) -> None:
    with Publisher() as publisher:
        events = KvEvents(listener, lambda _, rank: rank, time.monotonic)
        events.subscribe("a", [source_of(publisher)])
        assert events.status() == []
        async with events:
            await listener.until_live()


async def test_of_two_engines_for_one_number_the_first_is_followed(listener: Listener) -> None:
    with Publisher() as publisher:
        publisher.publish(*Cache().serve(prompt(0)))
        async with KvEvents(listener, lambda *_: 0, time.monotonic) as events:
            events.subscribe("a", [source_of(publisher), NOWHERE])
            await listener.until_live()
            assert listener.depth(prompt(0)) == 5


async def test_a_publisher_that_is_not_there_keeps_connecting_and_holds_up_nothing(listener: Listener) -> None:
    async with following(listener, NOWHERE) as events:
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            while not events.status():
                await asyncio.sleep(0.01)
        assert status(events)["state"] == "connecting"
        assert status(events)["last_event_seconds"] is None
    assert listener.states == {}


async def test_a_loop_that_stalls_loses_nothing_and_is_not_flooded_afterwards(listener: Listener) -> None:
    cache = Cache(capacity=2000)
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            for number in range(400):
                publisher.publish(*cache.serve(prompt(number, blocks=20)))
                if number == 200:
                    time.sleep(0.3)  # the loop hangs
            await listener.until(lambda: listener.depth(prompt(399, blocks=20)) == 20)
            await listener.until(lambda: len(listener.index) == 2000)
            assert status(events)["lost_views"] == 0
    assert listener.largest_update <= 1024


async def test_an_exception_in_the_receiver_stops_no_later_update(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context["exception"])))
    changed, pending = listener.changed, [RuntimeError("a fault")]

    def faulty(*news: Any) -> None:
        if pending:
            raise pending.pop()
        changed(*news)

    monkeypatch.setattr(listener, "changed", faulty)
    with Publisher() as publisher:
        for number in range(600):
            publisher.publish(*Cache().serve(prompt(number)))
        async with following(listener, source_of(publisher)):
            await listener.until_live()
            assert listener.depth(prompt(599)) == 5
    assert faults == ["a fault"]


async def test_nothing_is_passed_on_after_the_end(listener: Listener) -> None:
    with Publisher() as publisher:
        publisher.publish(*Cache().serve(prompt(0)))
        async with following(listener, source_of(publisher)) as events:
            await listener.until_live()
        events.subscribe("a", [source_of(publisher)])
        events.restarted("a")
        assert events.status() == []
        for _ in range(10):
            await asyncio.sleep(0)
        seen = len(listener.calls)
        publisher.publish(*Cache().serve(prompt(1)))
        await asyncio.sleep(0.05)
        assert len(listener.calls) == seen
