import pytest
from structlog.testing import capture_logs

from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.observe.record import Record
from gateway.core.request import Demand
from gateway.core.routing.engine import EngineUse
from tests.unit.caching import KV_TOKENS, Scene, asking


def test_what_was_sent_to_an_engine_is_a_hit_there_and_its_backend_holds_it() -> None:
    scene, ask = Scene(), asking("x" * 4096)
    scene.sent(ask, scene.a.engines[0].index)
    assert scene.hits(ask) == [1008, 0]
    assert scene.cache_state.holders(ask.keys[-1]) == ["a"]
    assert scene.cache_state.holders(1) == []


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


def test_failing_predictions_lower_the_hit_accuracy_and_are_logged() -> None:
    scene, ask = Scene(engines=2), asking("x" * 4096)
    engine = scene.b.engines[1].index
    with capture_logs() as logs:
        for cached in [100] * 10 + [512] * 20:
            scene.answered(ask, engine, int(512 * scene.cache_state.hit_accuracy.share(engine)), cached)
    logged = [(entry["log_level"], entry["event"], entry["backend"], entry["rank"]) for entry in logs]
    assert logged == [("warning", "prefix_trust", "b", 1), ("info", "prefix_trust", "b", 1)]
    assert logs[0]["confirmed_share"] < 0.5 < 0.8 <= logs[1]["confirmed_share"]


def test_requests_without_usage_or_prompt_teach_nothing() -> None:
    scene = Scene()
    scene.cache_state.learn(Record("id", "chat", 0.0))
    scene.answered(Demand("m"), 0, 0, 0)
    assert scene.cache_state.index.used_bytes(0) == 0
    assert scene.cache_state.hit_accuracy.share(0) == 1.0
    assert scene.cache_state.estimates.bytes_per_token("m") == 4.0
