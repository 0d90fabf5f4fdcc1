import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import pytest
import zmq

from gateway.core.supervisor import Supervisor
from gateway.features.exact import feed
from gateway.features.exact import stream as module
from gateway.features.exact.endpoints import Source
from gateway.features.exact.feed import KvEvents
from gateway.features.exact.stream import Stream, Update
from tests.unit.exact.following import prompt
from tests.unit.exact.listener import source_of
from tests.unit.exact.publisher import Cache, Publisher, stored


class Inbox:
    """Updates as they are delivered, in whatever thread; each is applied at once."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._news = threading.Condition()

    def deliver(self, updates: list[Update]) -> None:
        with self._news:
            for update in updates:
                update()
            self._news.notify_all()

    def changed(self, engine: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        self.seen.append(("changed", engine, set(added), set(removed), resident_tokens))

    def cleared(self, engine: int) -> None:
        self.seen.append(("cleared", engine))

    def state(self, engine: int, live: bool, whole: bool) -> None:
        self.seen.append(("state", engine, live, whole))

    def comes(self, holds: Callable[[], object], within_seconds: float) -> bool:
        with self._news:
            return bool(self._news.wait_for(holds, timeout=within_seconds))

    def wait(self, holds: Callable[[], object]) -> None:
        assert self.comes(holds, within_seconds=10)

    def held(self, engine: int = 0) -> set[int]:
        keys = set[int]()
        for what, number, *more in self.seen:
            if (what, number) == ("changed", engine):
                keys = keys - more[1] | more[0]
        return keys

    def states(self, engine: int = 0) -> list[tuple[bool, bool]]:
        return [(more[0], more[1]) for what, number, *more in self.seen if (what, number) == ("state", engine)]


class Reader(KvEvents):
    """The thread alone: it delivers to an inbox, and no event loop is needed."""

    def __init__(self, inbox: Inbox, supervisor: Supervisor | None = None) -> None:
        super().__init__(inbox, lambda _, rank: rank, time.monotonic, supervisor=supervisor)
        self._deliver = inbox.deliver  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._stop(self._thread)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def reader(inbox: Inbox) -> Iterator[Reader]:
    with Reader(inbox) as reader:
        yield reader


def test_a_large_change_comes_in_pieces_and_before_the_state(reader: Reader, inbox: Inbox) -> None:
    with Publisher() as publisher:
        publisher.publish(stored(range(3000), range(12000), None, 4))
        reader.subscribe("a", [source_of(publisher)])
        inbox.wait(inbox.states)
        *changes, last = inbox.seen
        assert [len(added) for _, _, added, _, _ in changes] == [1024, 1024, 952]
        assert last == ("state", 0, True, True)
        assert {resident_tokens for *_, resident_tokens in changes} == {12000}


def test_of_an_engine_that_is_forgotten_nothing_is_known(reader: Reader, inbox: Inbox) -> None:
    with Publisher() as publisher:
        publisher.publish(*Cache().serve(prompt(0)))
        reader.subscribe("a", [source_of(publisher)])
        inbox.wait(inbox.states)
        assert len(inbox.held()) == 5
        reader.subscribe("a", [])
        inbox.wait(lambda: not inbox.held())
        assert inbox.states() == [(True, True), (False, False)]
    after = inbox.seen[inbox.seen.index(("state", 0, False, False)) :]
    assert any(removed for what, _, *more in after if what == "changed" for removed in [more[1]])
    assert not any(what == "cleared" for what, *_ in inbox.seen)  # the engine may hold what it held
    assert reader.status() == []


def test_another_source_for_an_engine_takes_the_place_of_the_first(reader: Reader, inbox: Inbox) -> None:
    with Publisher() as first, Publisher() as second:
        first.publish(*Cache().serve(prompt(0)))
        second.publish(*Cache().serve(prompt(1, blocks=7)))
        reader.subscribe("a", [source_of(first)])
        inbox.wait(inbox.states)
        reader.subscribe("a", [source_of(second)])
        inbox.wait(lambda: len(inbox.states()) == 3)
    assert len(inbox.held()) == 7


def test_the_end_of_the_reader_clears_every_engine(inbox: Inbox) -> None:
    with Publisher() as publisher, Reader(inbox) as reader:
        publisher.publish(*Cache().serve(prompt(0)))
        reader.subscribe("a", [source_of(publisher)])
        inbox.wait(inbox.states)
    assert inbox.states()[-1] == (False, False)
    assert inbox.held() == set()


def test_the_reader_waits_for_a_loop_that_is_behind(reader: Reader, inbox: Inbox) -> None:
    cache = Cache()
    with Publisher() as publisher:
        reader.subscribe("a", [source_of(publisher)])
        inbox.wait(inbox.states)
        publisher.wait_for_subscriber()
        reader._updates.extend([lambda: None] * (feed.MAX_PENDING_UPDATES + 1))
        reader.subscribe("a", [source_of(publisher)])  # a turn that ends in waiting
        publisher.publish(*cache.serve(prompt(0)))
        assert not inbox.comes(inbox.held, within_seconds=0.2)
        reader._updates.clear()
        inbox.wait(lambda: len(inbox.held()) == 5)


def test_a_fault_in_one_stream_leaves_the_others_alone(
    reader: Reader, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    faults = iter([RuntimeError("a fault"), zmq.ZMQError(1)])
    take = Stream._take

    def faulty(stream: Stream, sequence: int, payload: bytes) -> None:
        if stream.source.rank == 0 and (fault := next(faults, None)):
            raise fault
        take(stream, sequence, payload)

    monkeypatch.setattr(Stream, "_take", faulty)
    with Publisher() as publisher:
        publisher.publish(*Cache().serve(prompt(0)))
        reader.subscribe("a", [source_of(publisher)])
        reader.subscribe("b", [source_of(publisher, rank=1)])
        inbox.wait(lambda: inbox.states(1))
        inbox.wait(lambda: inbox.states(0))
    assert len(inbox.held(0)) == len(inbox.held(1)) == 5


def test_a_port_that_is_taken_is_tried_again(reader: Reader, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    with Publisher() as holder:
        source = Source(0, holder.endpoint, None, bind=True)
        reader.subscribe("a", [source])
    with Publisher(connect_to=holder.endpoint, replay=False) as publisher:
        inbox.wait(inbox.states)
        publisher.wait_for_subscriber()
        publisher.publish(*Cache().serve(prompt(0)))
        inbox.wait(lambda: len(inbox.held()) == 5)


def test_a_fault_outside_the_streams_does_not_end_the_reader(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, faults = Supervisor(time.monotonic), iter([RuntimeError("a fault")])

    deliver = inbox.deliver

    def faulty(updates: list[Update]) -> None:
        if fault := next(faults, None):
            raise fault
        deliver(updates)

    monkeypatch.setattr(inbox, "deliver", faulty)
    with Publisher() as publisher, Reader(inbox, supervisor) as reader:
        reader.subscribe("a", [source_of(publisher)])
        inbox.comes(lambda: supervisor.faults, within_seconds=5)
        assert supervisor.faults == {"kv_events": 1}
        publisher.wait_for_subscriber()
        publisher.publish(*Cache().serve(prompt(0)))
        inbox.wait(lambda: len(inbox.held()) == 5)
