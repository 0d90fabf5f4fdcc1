"""What engines' own events say of their caches, beside the gateway's own record."""

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.core.observe.record import Record
from gateway.core.request import Demand, Usage
from gateway.core.routing.engine import EngineLoad
from gateway.features.exact.caches import ExactCaches
from gateway.features.exact.index import ExactIndex
from tests.unit.caching import Scene, asking


class ExactScene(Scene):
    """Its engines may report their blocks."""

    def __init__(self, engines: int = 1, **facts: Any) -> None:
        super().__init__(engines, **facts)
        self.exact = ExactIndex()
        self.caches = ExactCaches(self.exact, self.fleet, self.cache_state)
        self.cache_state.use(self.caches)

    def over(self, now: float) -> None:
        """Some request is over, without an answer."""
        record = Record("id", "chat", 0.0)
        record.ended_seconds = now
        self.cache_state.learn(record)


def loaded(scene: ExactScene, index: int) -> EngineLoad:
    engine = scene.fleet.engine(index)
    assert engine is not None
    return engine.load


def test_every_engine_of_a_backend_has_a_number_of_its_own() -> None:
    scene = ExactScene(engines=2)
    engines = [scene.caches.engine_number("b", rank) for rank in range(2)]
    assert [engine.index for engine in scene.fleet.engines()] == [scene.a.engines[0].index, *engines]
    assert scene.caches.engine_number("a", 0) == scene.a.engines[0].index
    for engine, rank in zip(engines, range(2), strict=True):
        assert engine is not None
        engine = scene.fleet.engine(engine)
        assert engine is not None
        assert (engine.name, engine.rank) == ("b", rank)


@pytest.mark.parametrize(("backend", "rank"), [("b", 2), ("a", 1), ("missing", 0)])
def test_an_engine_that_does_not_exist_has_no_number(backend: str, rank: int) -> None:
    assert ExactScene(engines=2).caches.engine_number(backend, rank) is None


def test_an_engines_own_blocks_count_while_all_of_them_are_known() -> None:
    scene, ask = ExactScene(), asking("x" * 4096, exact=True)
    engine, report = scene.a.engines[0].index, scene.caches.changed
    scene.sent(ask, engine)
    report(engine, ask.token_keys[:10], (), 160)
    for live, whole, hits in [(True, False, 1008), (True, True, 160), (False, False, 1008), (True, True, 160)]:
        scene.caches.state(engine, live, whole)
        assert scene.hits(ask)[engine] == hits
    report(engine, (), ask.token_keys[3:10], 48)
    assert scene.hits(ask)[engine] == 48


def test_blocks_on_their_way_count_until_they_are_reported_evicted_or_never_come() -> None:
    scene, ask, engine = ExactScene(), asking("x" * 4096, exact=True), 0
    scene.caches.state(engine, True, True)
    report, keys = scene.caches.changed, ask.token_keys

    def never_comes() -> None:
        for seconds in (100.0, 200.0, 300.0):
            scene.over(seconds)

    ends: list[tuple[Callable[[], None], int]] = [
        (lambda: report(engine, keys, (), 1024), 1008),
        (lambda: report(engine, (), keys, 0), 0),
        (lambda: scene.caches.cleared(engine), 0),
        (never_comes, 0),
    ]
    for end, hit in ends:
        report(engine, (), keys, 0)
        scene.sent(ask, engine)
        assert scene.hits(ask)[engine] == 1008
        end()
        assert scene.hits(ask)[engine] == hit


def answering(scene: ExactScene, ask: Demand, engine: int, now: float, cached: int = 0) -> None:
    """The request is sent and answered."""
    scene.sent(ask, engine)
    record = Record("id", "chat", now)
    record.model, record.demand, record.engine_index, record.ended_seconds = "m", ask, engine, now
    record.usage = Usage(ask.prompt_tokens, 1, cached)
    scene.cache_state.learn(record)


def test_an_engine_that_answers_without_events_is_stale_and_the_record_is_used_again() -> None:
    scene, engine = ExactScene(), 0
    first, second = asking("abcd" * 1024, exact=True), asking("efgh" * 1024, exact=True)
    scene.caches.state(engine, True, True)
    with capture_logs() as logs:
        answering(scene, first, engine, 100.0)
        answering(scene, second, engine, 102.0)
        assert scene.exact.live(engine)
        scene.over(103.5)
        assert not scene.exact.live(engine)
        scene.over(130.0)
        assert [scene.hits(ask)[engine] for ask in (first, second)] == [1008, 1008]
        scene.caches.changed(engine, second.token_keys, (), 1024)
        assert scene.exact.live(engine)
        assert [scene.hits(ask)[engine] for ask in (first, second)] == [0, 1008]
    logged = [(entry["log_level"], entry["silent"]) for entry in logs if entry["event"] == "kv_events_silent"]
    assert logged == [("warning", True), ("info", False)]


def test_an_engine_without_new_blocks_is_not_stale() -> None:
    scene, ask, engine = ExactScene(), asking("abcd" * 1024, exact=True), 0
    scene.caches.state(engine, True, True)
    scene.caches.changed(engine, ask.token_keys, (), 1024)
    for number in range(10):
        answering(scene, ask, engine, 100.0 + number, cached=1008)
    answering(scene, asking("wxyz" * 1024, exact=True), engine, 200.0)
    scene.caches.changed(engine, (1, 2), (), 1056)
    scene.over(300.0)
    assert scene.exact.live(engine)


def test_a_new_connection_ends_a_silence() -> None:
    scene, engine = ExactScene(), 0
    scene.caches.state(engine, True, True)
    answering(scene, asking("abcd" * 1024, exact=True), engine, 100.0)
    scene.over(110.0)
    for whole in (False, True):
        scene.caches.state(engine, True, whole)
        assert scene.exact.live(engine) == whole


def test_evictions_shrink_the_record_to_what_is_held_and_on_its_way() -> None:
    scene, engine = ExactScene(), 0
    older, newer = asking("x" * 8192), asking("y" * 8192)
    for ask in (older, newer):
        scene.sent(ask, engine)
    scene.caches.state(engine, True, True)
    scene.caches.changed(engine, (), (77,), 2048 + 2048)
    assert [scene.hits(ask)[engine] for ask in (older, newer)] == [2032, 2032]
    loaded(scene, engine).context_tokens = 1024
    scene.caches.changed(engine, (), (78,), 1024)
    assert [scene.hits(ask)[engine] for ask in (older, newer)] == [0, 2032]
    loaded(scene, engine).context_tokens = 0
    scene.caches.changed(engine, (), (79,), 0)
    assert scene.cache_state.index.used_bytes(engine) == 0


def test_a_view_that_is_dropped_or_not_whole_takes_nothing_from_the_record() -> None:
    scene, ask, engine = ExactScene(), asking("x" * 4096, exact=True), 0
    scene.sent(ask, engine)
    scene.caches.state(engine, True, True)
    scene.caches.changed(engine, ask.token_keys, (), 1024)
    for live in (True, False):
        scene.caches.state(engine, live, False)
        scene.caches.changed(engine, (), ask.token_keys, 0)
        assert scene.hits(ask)[engine] == 1008


def test_a_cache_that_was_cleared_leaves_no_record() -> None:
    scene, ask = ExactScene(), asking("x" * 4096)
    for engine in (0, 1):
        scene.sent(ask, engine)
    scene.caches.cleared(0)
    assert scene.hits(ask) == [0, 1008]


def test_events_of_an_engine_that_is_no_more_are_put_up_with() -> None:
    scene = ExactScene(engines=2)
    gone, ask = scene.caches.engine_number("b", 1), asking("x" * 4096, exact=True)
    assert gone is not None
    scene.sent(ask, gone)
    scene.caches.state(gone, True, True)
    scene.caches.changed(gone, ask.token_keys, (), 1024)
    scene.learn_facts(engines=1)
    assert scene.fleet.engine(gone) is None
    scene.answered(ask, gone, 0, 0)
    for _ in range(10):  # until its share is lowered, which is not logged
        scene.answered(asking("z" * 4096), gone, 512, 0)
    scene.caches.changed(gone, (), ask.token_keys[:5], 900)
    scene.caches.cleared(gone)
    scene.caches.state(gone, False, False)
    scene.caches.changed(gone, (), ask.token_keys, 0)
    assert len(scene.exact) == 0


def test_what_events_predicted_says_nothing_of_the_record() -> None:
    scene, ask, engine = ExactScene(), asking("x" * 8192, exact=True), 0
    scene.sent(ask, engine)
    scene.caches.state(engine, True, True)
    for _ in range(10):
        scene.answered(ask, engine, 2032, 0)
    assert scene.cache_state.hit_accuracy.share(engine) == 1.0
    scene.caches.state(engine, False, False)
    assert scene.hits(ask)[engine] == 2032
    for _ in range(2):
        scene.answered(ask, engine, 2032, 0)
    assert scene.cache_state.hit_accuracy.share(engine) == pytest.approx(0.64)
    assert scene.cache_state.index.used_bytes(engine) == 8192  # wiped, but for this prompt
