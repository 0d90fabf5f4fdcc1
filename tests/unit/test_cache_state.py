from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway._native import prefix_keys
from gateway.backends.facts import Facts, ModelCard
from gateway.backends.fleet import Fleet
from gateway.backends.settings import BackendConfig
from gateway.config import HealthConfig, RoutingConfig
from gateway.exact.index import packed, token_keys, token_seed
from gateway.feedback import CacheState
from gateway.observe.record import Record
from gateway.request import Demand, Usage
from gateway.routing.engine import Engine, EngineLoad, EngineUse
from gateway.routing.prompt_blocks import seed

BLOCK_TOKENS = 16
KV_TOKENS = 10_000


class Scene:
    """Backends a and b; b may run two engines."""

    def __init__(self, engines: int = 1, **facts: Any) -> None:
        configs = tuple(BackendConfig(url=f"http://10.0.0.{number}:1", name="ab"[number]) for number in range(2))
        self.fleet = Fleet(configs, HealthConfig(), clock=lambda: 0.0, random=Random(1))
        self.cache_state = CacheState(RoutingConfig(index_memory_bytes=1 << 22), self.fleet, lambda: 0.0)
        self.fleet.on_change.append(self.cache_state.follow_sizes)
        self.fleet.on_restart.append(self.cache_state.forget)
        self.a, self.b = self.fleet.backends
        self.learn_facts(engines, **facts)

    def learn_facts(self, engines: int = 1, **facts: Any) -> None:
        known = {"models": (ModelCard("m"),), "kv_cache_tokens": KV_TOKENS, **facts}
        self.fleet.learned(self.a, Facts(**known))
        self.fleet.learned(self.b, Facts(**known | {"engines": engines, "kv_cache_tokens": engines * KV_TOKENS}))

    def hits(self, ask: Demand) -> list[int]:
        return self.cache_state.hit_predictor.predict(ask, self.fleet.engines())

    def sent(self, ask: Demand, engine: int) -> None:
        """The request is placed there."""
        self.cache_state.hit_predictor.placed(ask, Engine(engine, "?"))

    def answered(self, ask: Demand, engine: int, predicted: int, cached: int | None, output: int = 1) -> None:
        record = Record("id", "chat", 0.0)
        record.model, record.demand, record.engine_index, record.predicted_hit_tokens = (
            ask.model,
            ask,
            engine,
            predicted,
        )
        record.usage = Usage(ask.prompt_tokens, output, cached)
        self.cache_state.learn(record)

    def over(self, now: float) -> None:
        """Some request is over, without an answer."""
        record = Record("id", "chat", 0.0)
        record.ended_seconds = now
        self.cache_state.learn(record)


def loaded(scene: Scene, index: int) -> EngineLoad:
    engine = scene.fleet.engine(index)
    assert engine is not None
    return engine.load


def asking(text: str, exact: bool = False) -> Demand:
    """A prompt of four bytes a token; `exact`: its tokens are known."""
    keys, edges, _ = prefix_keys([text.encode()], seed("m"))
    size = len(text)
    blocks = token_keys(packed(list(text.encode()[::4])), BLOCK_TOKENS, token_seed()) if exact else ()
    return Demand(
        "m", keys=keys, edges=edges, prompt_size=size, prompt_tokens=size // 4, learnable_bytes=size, token_keys=blocks
    )


def test_what_was_sent_to_an_engine_is_a_hit_there_and_its_backend_holds_it() -> None:
    scene, ask = Scene(), asking("x" * 4096)
    scene.sent(ask, scene.a.engines[0].index)
    assert scene.hits(ask) == [1008, 0]
    assert scene.cache_state.holders(ask.keys[-1]) == ["a"]
    assert scene.cache_state.holders(1) == []


def test_every_engine_of_a_backend_has_a_number_of_its_own() -> None:
    scene = Scene(engines=2)
    engines = [scene.cache_state.engine_number("b", rank) for rank in range(2)]
    assert [engine.index for engine in scene.fleet.engines()] == [scene.a.engines[0].index, *engines]
    assert scene.cache_state.engine_number("a", 0) == scene.a.engines[0].index
    for engine, rank in zip(engines, range(2), strict=True):
        assert engine is not None
        engine = scene.fleet.engine(engine)
        assert engine is not None
        assert (engine.name, engine.rank) == ("b", rank)


@pytest.mark.parametrize(("backend", "rank"), [("b", 2), ("a", 1), ("missing", 0)])
def test_an_engine_that_does_not_exist_has_no_number(backend: str, rank: int) -> None:
    assert Scene(engines=2).cache_state.engine_number(backend, rank) is None


def test_a_record_keeps_its_size_while_another_process_uses_a_part_of_the_engine() -> None:
    scene, ask = Scene(), asking("x" * 4096)
    engine = scene.a.engines[0]
    scene.sent(ask, engine.index)
    scene.fleet.share({engine.index: EngineUse(0, 1)})
    scene.cache_state.follow_sizes()
    assert scene.hits(ask) == [1008, 0]


def test_records_are_as_large_as_the_caches_by_the_bytes_a_token_that_were_learned() -> None:
    scene, long = Scene(), asking("x" * 200_000)
    scene.sent(long, scene.a.engines[0].index)
    assert scene.cache_state.index.used_bytes(scene.a.engines[0].index) <= KV_TOKENS * 4 < 200_000
    for number in range(100):  # eight bytes a token
        ask = asking(f"{number} " + "y" * 3000)
        ask.prompt_tokens = ask.prompt_size // 8
        scene.answered(ask, scene.b.engines[0].index, 0, 0)
    scene.cache_state.follow_sizes()
    scene.sent(long, scene.a.engines[0].index)
    assert KV_TOKENS * 6 < scene.cache_state.index.used_bytes(scene.a.engines[0].index) <= KV_TOKENS * 8


@pytest.mark.parametrize("size", [None, 0])
def test_a_cache_of_unknown_size_has_a_large_record(size: int | None) -> None:
    scene, long = Scene(), asking("x" * 200_000)
    scene.fleet.learned(scene.a, Facts(models=(ModelCard("m"),), kv_cache_tokens=size))
    scene.cache_state.follow_sizes()
    scene.sent(long, scene.a.engines[0].index)
    assert scene.cache_state.index.used_bytes(scene.a.engines[0].index) == 200_000


def test_a_backend_that_restarted_holds_nothing_and_is_trusted_again() -> None:
    scene, ask = Scene(process_start_seconds=1.0), asking("x" * 4096)
    for engine in (scene.a.engines[0].index, scene.b.engines[0].index):
        scene.sent(ask, engine)
    for _ in range(10):
        scene.answered(ask, scene.a.engines[0].index, 512, 0)
    assert scene.cache_state.hit_accuracy.share(scene.a.engines[0].index) < 0.5
    scene.learn_facts(process_start_seconds=2.0)
    assert scene.hits(ask) == [0, 0]
    assert scene.cache_state.hit_accuracy.share(scene.a.engines[0].index) == 1.0


def test_all_engines_of_a_backend_that_restarted_hold_nothing() -> None:
    scene, ask = Scene(engines=2), asking("x" * 4096)
    for engine in scene.fleet.engines():
        scene.sent(ask, engine.index)
    scene.cache_state.forget(scene.b)
    assert scene.hits(ask) == [1008, 0, 0]


def test_an_engines_own_blocks_count_while_all_of_them_are_known() -> None:
    scene, ask = Scene(), asking("x" * 4096, exact=True)
    engine, report = scene.a.engines[0].index, scene.cache_state.changed
    scene.sent(ask, engine)
    report(engine, ask.token_keys[:10], (), 160)
    for live, whole, hits in [(True, False, 1008), (True, True, 160), (False, False, 1008), (True, True, 160)]:
        scene.cache_state.state(engine, live, whole)
        assert scene.hits(ask)[engine] == hits
    report(engine, (), ask.token_keys[3:10], 48)
    assert scene.hits(ask)[engine] == 48


def test_blocks_on_their_way_count_until_they_are_reported_evicted_or_never_come() -> None:
    scene, ask, engine = Scene(), asking("x" * 4096, exact=True), 0
    scene.cache_state.state(engine, True, True)
    report, keys = scene.cache_state.changed, ask.token_keys

    def never_comes() -> None:
        for seconds in (100.0, 200.0, 300.0):
            scene.over(seconds)

    ends: list[tuple[Callable[[], None], int]] = [
        (lambda: report(engine, keys, (), 1024), 1008),
        (lambda: report(engine, (), keys, 0), 0),
        (lambda: scene.cache_state.cleared(engine), 0),
        (never_comes, 0),
    ]
    for end, hit in ends:
        report(engine, (), keys, 0)
        scene.sent(ask, engine)
        assert scene.hits(ask)[engine] == 1008
        end()
        assert scene.hits(ask)[engine] == hit


def answering(scene: Scene, ask: Demand, engine: int, now: float, cached: int = 0) -> None:
    """The request is sent and answered."""
    scene.sent(ask, engine)
    record = Record("id", "chat", now)
    record.model, record.demand, record.engine_index, record.ended_seconds = "m", ask, engine, now
    record.usage = Usage(ask.prompt_tokens, 1, cached)
    scene.cache_state.learn(record)


def test_an_engine_that_answers_without_events_is_stale_and_the_record_is_used_again() -> None:
    scene, engine = Scene(), 0
    first, second = asking("abcd" * 1024, exact=True), asking("efgh" * 1024, exact=True)
    scene.cache_state.state(engine, True, True)
    with capture_logs() as logs:
        answering(scene, first, engine, 100.0)
        answering(scene, second, engine, 102.0)
        assert scene.cache_state.exact.live(engine)
        scene.over(103.5)
        assert not scene.cache_state.exact.live(engine)
        scene.over(130.0)
        assert [scene.hits(ask)[engine] for ask in (first, second)] == [1008, 1008]
        scene.cache_state.changed(engine, second.token_keys, (), 1024)
        assert scene.cache_state.exact.live(engine)
        assert [scene.hits(ask)[engine] for ask in (first, second)] == [0, 1008]
    logged = [(entry["log_level"], entry["silent"]) for entry in logs if entry["event"] == "kv_events_silent"]
    assert logged == [("warning", True), ("info", False)]


def test_an_engine_without_new_blocks_is_not_stale() -> None:
    scene, ask, engine = Scene(), asking("abcd" * 1024, exact=True), 0
    scene.cache_state.state(engine, True, True)
    scene.cache_state.changed(engine, ask.token_keys, (), 1024)
    for number in range(10):
        answering(scene, ask, engine, 100.0 + number, cached=1008)
    answering(scene, asking("wxyz" * 1024, exact=True), engine, 200.0)
    scene.cache_state.changed(engine, (1, 2), (), 1056)
    scene.over(300.0)
    assert scene.cache_state.exact.live(engine)


def test_a_new_connection_ends_a_silence() -> None:
    scene, engine = Scene(), 0
    scene.cache_state.state(engine, True, True)
    answering(scene, asking("abcd" * 1024, exact=True), engine, 100.0)
    scene.over(110.0)
    for whole in (False, True):
        scene.cache_state.state(engine, True, whole)
        assert scene.cache_state.exact.live(engine) == whole


def test_evictions_shrink_the_record_to_what_is_held_and_on_its_way() -> None:
    scene, engine = Scene(), 0
    older, newer = asking("x" * 8192), asking("y" * 8192)
    for ask in (older, newer):
        scene.sent(ask, engine)
    scene.cache_state.state(engine, True, True)
    scene.cache_state.changed(engine, (), (77,), 2048 + 2048)
    assert [scene.hits(ask)[engine] for ask in (older, newer)] == [2032, 2032]
    loaded(scene, engine).context_tokens = 1024
    scene.cache_state.changed(engine, (), (78,), 1024)
    assert [scene.hits(ask)[engine] for ask in (older, newer)] == [0, 2032]
    loaded(scene, engine).context_tokens = 0
    scene.cache_state.changed(engine, (), (79,), 0)
    assert scene.cache_state.index.used_bytes(engine) == 0


def test_a_view_that_is_dropped_or_not_whole_takes_nothing_from_the_record() -> None:
    scene, ask, engine = Scene(), asking("x" * 4096, exact=True), 0
    scene.sent(ask, engine)
    scene.cache_state.state(engine, True, True)
    scene.cache_state.changed(engine, ask.token_keys, (), 1024)
    for live in (True, False):
        scene.cache_state.state(engine, live, False)
        scene.cache_state.changed(engine, (), ask.token_keys, 0)
        assert scene.hits(ask)[engine] == 1008


def test_a_cache_that_was_cleared_leaves_no_record() -> None:
    scene, ask = Scene(), asking("x" * 4096)
    for engine in (0, 1):
        scene.sent(ask, engine)
    scene.cache_state.cleared(0)
    assert scene.hits(ask) == [0, 1008]


def test_events_of_an_engine_that_is_no_more_are_put_up_with() -> None:
    scene = Scene(engines=2)
    gone, ask = scene.cache_state.engine_number("b", 1), asking("x" * 4096, exact=True)
    assert gone is not None
    scene.sent(ask, gone)
    scene.cache_state.state(gone, True, True)
    scene.cache_state.changed(gone, ask.token_keys, (), 1024)
    scene.learn_facts(engines=1)
    assert scene.fleet.engine(gone) is None
    scene.answered(ask, gone, 0, 0)
    for _ in range(10):  # until its share is lowered, which is not logged
        scene.answered(asking("z" * 4096), gone, 512, 0)
    scene.cache_state.changed(gone, (), ask.token_keys[:5], 900)
    scene.cache_state.cleared(gone)
    scene.cache_state.state(gone, False, False)
    scene.cache_state.changed(gone, (), ask.token_keys, 0)
    assert len(scene.cache_state.exact) == 0


def test_failing_predictions_lower_the_hit_accuracy_and_are_logged() -> None:
    scene, ask = Scene(engines=2), asking("x" * 4096)
    engine = scene.cache_state.engine_number("b", 1)
    assert engine is not None
    with capture_logs() as logs:
        for cached in [100] * 10 + [512] * 20:
            scene.answered(ask, engine, int(512 * scene.cache_state.hit_accuracy.share(engine)), cached)
    logged = [(entry["log_level"], entry["event"], entry["backend"], entry["rank"]) for entry in logs]
    assert logged == [("warning", "prefix_trust", "b", 1), ("info", "prefix_trust", "b", 1)]
    assert logs[0]["confirmed_share"] < 0.5 < 0.8 <= logs[1]["confirmed_share"]


def test_what_events_predicted_says_nothing_of_the_record() -> None:
    scene, ask, engine = Scene(), asking("x" * 8192, exact=True), 0
    scene.sent(ask, engine)
    scene.cache_state.state(engine, True, True)
    for _ in range(10):
        scene.answered(ask, engine, 2032, 0)
    assert scene.cache_state.hit_accuracy.share(engine) == 1.0
    scene.cache_state.state(engine, False, False)
    assert scene.hits(ask)[engine] == 2032
    for _ in range(2):
        scene.answered(ask, engine, 2032, 0)
    assert scene.cache_state.hit_accuracy.share(engine) == pytest.approx(0.64)
    assert scene.cache_state.index.used_bytes(engine) == 8192  # wiped, but for this prompt


def test_requests_without_usage_or_prompt_teach_nothing() -> None:
    scene = Scene()
    scene.cache_state.learn(Record("id", "chat", 0.0))
    scene.answered(Demand("m"), 0, 0, 0)
    assert scene.cache_state.index.used_bytes(0) == 0
    assert scene.cache_state.hit_accuracy.share(0) == 1.0
    assert scene.cache_state.estimates.bytes_per_token("m") == 4.0
