"""What a stream knows after what may happen between a publisher and a subscriber; with real sockets on loopback."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Self

import msgspec
import pytest

from gateway.features.exact import stream
from gateway.features.exact.endpoints import Source
from tests.unit.exact.following import following, prompt
from tests.unit.exact.listener import Listener, source_of, status
from tests.unit.exact.publisher import Cache, Publisher, stored


@pytest.fixture
def listener() -> Listener:
    return Listener()


async def test_events_are_followed_as_they_come(listener: Listener) -> None:
    cache = Cache(capacity=8)
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            publisher.publish(*cache.serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            assert listener.depth(prompt(1)) == cache.hit_blocks(prompt(1)) == 3
            assert listener.resident_tokens == {0: 32}
            publisher.publish(*cache.reset())
            await listener.until(lambda: listener.clears == [0] and len(listener.index) == 0)
            seen = status(events)
    assert (seen["events"], seen["messages"], seen["gaps"], seen["state"]) == (5, 3, 0, "live")


async def test_a_late_subscriber_learns_what_is_cached_already(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        for number in range(50):
            publisher.publish(*cache.serve(prompt(number)))
        async with following(listener, source_of(publisher)):
            await listener.joined(publisher, whole=True)
            assert [listener.depth(prompt(number)) for number in range(50)] == [5] * 50


async def test_a_late_subscriber_without_replay_begins_with_what_comes(listener: Listener) -> None:
    cache = Cache()
    with Publisher(replay=False) as publisher:
        publisher.publish(*cache.serve(prompt(1)))
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher, whole=False)
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            publisher.publish(*cache.serve([*prompt(1), *range(50, 58)]))
            await listener.until(lambda: status(events)["orphans"] == 2)
            assert listener.depth(prompt(1)) == 0
            assert status(events)["whole"] is False


async def test_the_first_subscriber_without_replay_knows_the_whole_cache(listener: Listener) -> None:
    with Publisher(replay=False) as publisher:
        async with following(listener, source_of(publisher)):
            await listener.joined(publisher, whole=False)
            publisher.publish(*Cache().serve(prompt(1)))
            await listener.until_live(whole=True)


async def test_a_late_subscriber_takes_what_the_buffer_still_has(listener: Listener) -> None:
    cache = Cache()
    with Publisher(buffer_steps=3) as publisher:
        for number in range(10):
            publisher.publish(*cache.serve(prompt(number)))
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher, whole=False)
            assert [listener.depth(prompt(number)) for number in range(10)] == [0] * 7 + [5] * 3
            assert status(events)["lost_views"] == 0


async def test_a_gap_is_filled_by_a_replay(listener: Listener) -> None:
    cache = Cache(capacity=12)
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            publisher.publish(*cache.serve(prompt(0)))
            for number in range(1, 4):
                publisher.publish(*cache.serve(prompt(number)), lost=True)
            publisher.publish(*cache.serve(prompt(4)))
            await listener.until(lambda: listener.depth(prompt(4)) == 5)
            assert [listener.depth(prompt(number)) for number in range(5)] == [0, 0, 2, 5, 5]
            seen = status(events)
            assert (seen["gaps"], seen["lost_views"], seen["messages"], seen["whole"]) == (1, 0, 5, True)


async def test_live_messages_that_come_during_a_replay_are_used_once(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            publisher.answering.clear()
            publisher.publish(*cache.serve(prompt(0)))
            publisher.publish(*cache.serve(prompt(1)), lost=True)
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until(lambda: not listener.states[0][0])
            for number in range(3, 20):
                publisher.publish(*cache.serve(prompt(number)))
            publisher.answering.set()
            await listener.until(lambda: listener.depth(prompt(19)) == 5)
            seen = status(events)
            assert (seen["messages"], seen["restarts"], seen["gaps"]) == (20, 0, 1)
            assert listener.depth(prompt(1)) == 5


async def test_beyond_the_buffer_all_is_dropped_and_the_rest_is_taken(listener: Listener) -> None:
    cache = Cache()
    with Publisher(buffer_steps=3) as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            publisher.publish(*cache.serve(prompt(0)))
            await listener.until(lambda: listener.depth(prompt(0)) == 5)
            for number in range(1, 10):
                publisher.publish(*cache.serve(prompt(number)), lost=True)
            publisher.publish(*cache.serve(prompt(10)))
            await listener.until(lambda: listener.depth(prompt(10)) == 5)
            assert [number for number in range(11) if listener.depth(prompt(number))] == [8, 9, 10]
            assert listener.removed_while_whole == 0
            assert (status(events)["whole"], status(events)["lost_views"], listener.clears) == (False, 1, [])
            publisher.publish(*cache.reset())
            await listener.until_live(whole=True)


async def test_a_view_is_whole_again_once_what_is_known_fills_the_cache(listener: Listener) -> None:
    cache = Cache(capacity=10)
    with Publisher(replay=False) as publisher:
        publisher.publish(*cache.serve(prompt(0)))
        async with following(listener, replace(source_of(publisher), capacity_tokens=40)):
            await listener.joined(publisher, whole=False)
            publisher.publish(*cache.serve(prompt(1)))
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until_live(whole=True)
            assert [listener.depth(prompt(number)) for number in range(3)] == [0, 5, 5]


async def test_what_no_cache_can_hold_is_dropped_and_not_whole(listener: Listener) -> None:
    cache = Cache(capacity=1000)
    with Publisher() as publisher:
        async with following(listener, replace(source_of(publisher), capacity_tokens=8)) as events:
            await listener.joined(publisher)
            for number in range(3):
                publisher.publish(*cache.serve(prompt(number)))
            await listener.until(lambda: listener.states[0] == (True, False))
            assert (status(events)["lost_views"], listener.clears, listener.removed_while_whole) == (1, [], 0)


async def test_a_new_connection_that_proves_nothing_is_no_proof_of_a_new_process(listener: Listener) -> None:
    cache = Cache()
    with Publisher(replay=False) as publisher:
        async with (
            Wire(publisher.ports[0]) as wire,
            following(listener, Source(0, wire.endpoint, None, topic="kv@test")) as events,
        ):
            await listener.joined(publisher, whole=False)
            publisher.publish(*cache.serve(prompt(0)))
            await listener.until(lambda: listener.depth(prompt(0)) == 5)
            await wire.cut()
            await listener.until(lambda: not listener.states[0][0])
            publisher.publish(*cache.serve(prompt(1)))  # without a subscriber
            async with asyncio.timeout(10):
                while not status(events)["lost_views"]:
                    publisher.publish(*cache.serve(prompt(2)))
                    await asyncio.sleep(0.02)
            publisher.publish(*cache.serve(prompt(3)))
            await listener.until(lambda: listener.depth(prompt(3)) == 5)
            assert (status(events)["restarts"], listener.depth(prompt(0)), listener.clears) == (0, 0, [])


async def test_a_gap_without_replay_drops_all_that_was_known(listener: Listener) -> None:
    cache = Cache()
    with Publisher(replay=False) as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher, whole=False)
            publisher.publish(*cache.serve(prompt(0)))
            await listener.until(lambda: listener.depth(prompt(0)) == 5)
            publisher.publish(*cache.serve(prompt(1)), lost=True)
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            assert listener.depth(prompt(0)) == 0
            assert (status(events)["lost_views"], status(events)["whole"]) == (1, False)


async def test_an_answer_with_a_hole_is_asked_for_again_from_there(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        for number in range(10):
            publisher.publish(*cache.serve(prompt(number)))
        publisher.tear_at = 4
        async with following(listener, source_of(publisher)):
            await listener.joined(publisher, whole=True)
            assert [listener.depth(prompt(number)) for number in range(10)] == [5] * 10
        assert publisher.replays == [0, 3]  # the last one that was used proves the process


async def test_an_answer_without_an_end_is_asked_for_again_from_where_it_stopped(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PAUSE_SECONDS", 0.1)
    cache = Cache()
    with Publisher() as publisher:
        for number in range(10):
            publisher.publish(*cache.serve(prompt(number)))
        publisher.cut_at = 6
        async with following(listener, source_of(publisher)):
            await listener.until_live(whole=True)
            assert [listener.depth(prompt(number)) for number in range(10)] == [5] * 10
        assert publisher.replays == [0, 5]


async def test_a_long_replay_is_had_though_queues_are_short(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PAUSE_SECONDS", 0.2)
    with Publisher() as publisher:
        for number in range(10_000):
            publisher.publish(stored([number], range(number, number + 4), None, 4), lost=True)
        async with following(listener, source_of(publisher)) as events:
            await listener.until_live(whole=True)
            assert status(events)["messages"] == 10_000
            assert len(listener.index) == 10_000


async def test_a_new_process_is_noticed_though_it_says_nothing(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        publisher.publish(*cache.serve(prompt(1)))
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            publisher.close()
            await listener.until(lambda: not listener.states[0][0])
            assert status(events)["state"] == "lost"
            with Publisher(ports=publisher.ports):
                await listener.until_live()
                assert len(listener.index) == 0
                assert (status(events)["restarts"], listener.clears) == (1, [0])


async def test_what_came_before_a_process_ended_is_not_taken_for_another_connection(listener: Listener) -> None:
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            for number in range(500):
                publisher.publish(stored([number], range(number, number + 4), None, 4))
            publisher.close()
            await listener.until(lambda: status(events)["messages"] >= 500)
            await listener.until(lambda: status(events)["state"] == "lost")
            with Publisher(ports=publisher.ports):
                await listener.until_live()
                await listener.until(lambda: len(listener.index) == 0)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("messages", [1, 4, 5, 9])
async def test_a_new_process_is_recognized_however_far_it_has_come(
    listener: Listener, replay: bool, messages: int
) -> None:
    cache, fresh = Cache(), Cache()
    with Publisher(replay=replay) as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher, whole=replay)
            for number in range(5):
                publisher.publish(*cache.serve(prompt(number)))
            await listener.until(lambda: listener.depth(prompt(4)) == 5)
            publisher.close()
            await listener.until(lambda: not listener.states[0][0])
            with Publisher(ports=publisher.ports, replay=replay) as successor:
                for number in range(messages - 1):
                    successor.publish(*fresh.serve(prompt(100 + number)), lost=True)
                await asyncio.to_thread(successor.wait_for_subscriber)
                successor.publish(*fresh.serve(prompt(200)))
                await listener.until(lambda: listener.depth(prompt(200)) == 5)
                if replay or messages != 6:
                    assert [listener.depth(prompt(number)) for number in range(5)] == [0] * 5
                if replay:
                    assert listener.depth(prompt(100)) == (5 if messages > 1 else 0)
                    assert status(events)["whole"] is True


async def test_a_lost_connection_costs_nothing_if_the_process_lives(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        async with Wire(publisher.ports[0]) as wire:
            source = Source(0, wire.endpoint, publisher.replay_endpoint, topic="kv@test")
            async with following(listener, source) as events:
                await listener.joined(publisher)
                publisher.publish(*cache.serve(prompt(1)))
                await listener.until(lambda: listener.depth(prompt(1)) == 5)
                await wire.cut()
                await listener.until(lambda: not listener.states[0][0])
                publisher.publish(*cache.serve(prompt(2)))  # without a subscriber
                await listener.until_live(whole=True)
                assert (listener.depth(prompt(1)), listener.depth(prompt(2)), listener.clears) == (5, 5, [])
                assert status(events)["restarts"] == 0


class Wire:
    """A port that passes everything on, until it is cut; it then passes on new connections."""

    def __init__(self, far_port: int) -> None:
        self._far_port = far_port
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """End all connections."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, far_writer))
                group.create_task(self._pass_on(far_reader, writer))
        except asyncio.CancelledError:
            return
        finally:
            self._tasks.discard(task)
            for each in (writer, far_writer):
                each.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()


async def test_a_replay_endpoint_that_does_not_answer_is_done_without(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "REPLAY_PATIENCE_SECONDS", 0.2)
    cache = Cache()
    with Publisher() as publisher:
        publisher.mute = True
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher, whole=False)
            publisher.publish(*cache.serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
            assert status(events)["state"] == "live"
            publisher.publish(*cache.serve(prompt(2)), lost=True)
            publisher.publish(*cache.serve(prompt(3)))
            await listener.until(lambda: listener.depth(prompt(3)) == 5)
            assert listener.depth(prompt(1)) == 0
        assert publisher.replays == [0]  # it is left alone for a while


async def test_other_topics_are_not_listened_to(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            for topic in (b"", b"kv", b"kv@test2", b"other"):
                publisher.publish_payload(b"not for us", topic=topic)
            publisher.publish(*cache.serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
            assert status(events)["malformed"] == 4  # the replay brings them whatever their topic


async def test_noise_is_counted_and_survived(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            publisher.publish(*cache.serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
            publisher.send_frames(b"kv@test")
            publisher.send_frames(b"kv@test", b"123", b"")
            publisher.send_frames(b"kv@test", b"12345678", b"", b"")
            publisher.publish_payload(b"\xc1 no message at all")
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            assert listener.depth(prompt(1)) == 0  # whatever it was, it is not known
            assert (status(events)["malformed"], status(events)["lost_views"]) == (4, 1)


async def test_a_message_beyond_the_limit_is_not_received(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            publisher.publish_payload(bytes(17 * 1024 * 1024))  # ends the connection, as often as it comes
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until(lambda: status(events)["state"] != "live")


async def test_a_publisher_that_connects_is_listened_for(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as holder:  # holds a port that is free afterwards
        endpoint = holder.endpoint
    async with following(listener, Source(0, endpoint, None, topic=None, bind=True)) as events:
        with Publisher(connect_to=endpoint, replay=False) as publisher:
            await listener.joined(publisher, whole=False)
            publisher.publish(*cache.serve(prompt(1)))
            await listener.until(lambda: listener.depth(prompt(1)) == 5)
        await listener.until(lambda: not listener.states[0][0])
        assert status(events)["state"] == "lost"


async def test_a_restart_that_others_noticed_first_drops_what_was_known(listener: Listener) -> None:
    cache = Cache()
    with Publisher() as publisher:
        publisher.publish(*cache.serve(prompt(1)))
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            events.restarted("a")  # of no weight while the connection proves the process
            publisher.publish(*cache.serve(prompt(2)))
            await listener.until(lambda: listener.depth(prompt(2)) == 5)
            assert listener.depth(prompt(1)) == 5
            publisher.close()
            await listener.until(lambda: not listener.states[0][0])
            events.restarted("a")
            await listener.until(lambda: len(listener.index) == 0)


async def test_a_hundred_thousand_events_are_followed(listener: Listener) -> None:
    cache = Cache(capacity=5000)
    with Publisher(buffer_steps=100_000) as publisher:
        async with following(listener, source_of(publisher)) as events:
            await listener.joined(publisher)
            sent = 0
            for number in range(1000):
                batch = [event for part in range(10) for event in cache.serve(prompt(number * 10 + part, blocks=10))]
                sent += len(batch)
                publisher.publish(*batch)
            last = prompt(9999, blocks=10)
            await listener.until(lambda: listener.depth(last) == 10 and len(listener.index) == 5000)
            assert sent > 100_000
            assert status(events)["events"] == sent
            wrong = [n for n in range(10_000) if listener.depth(prompt(n, 10)) != cache.hit_blocks(prompt(n, 10))]
            assert wrong == []
    assert listener.largest_update <= 1024


async def test_events_in_the_old_encoding_are_followed(listener: Listener) -> None:
    with Publisher() as publisher:
        async with following(listener, source_of(publisher)):
            await listener.joined(publisher)
            row = ["BlockStored", [b"h1", b"h2"], None, list(range(8)), 4, None]
            publisher.publish_payload(msgspec.msgpack.encode([1.0, [row]]))
            await listener.until(lambda: listener.depth(range(8)) == 2)
            publisher.publish_payload(msgspec.msgpack.encode([1.0, [["BlockRemoved", [b"h2"]]]]))
            await listener.until(lambda: listener.depth(range(8)) == 1)
