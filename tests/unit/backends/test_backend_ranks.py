"""Backends that run several engines: shares of what the backend has, and numbers that never change."""

from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig

from .conftest import MakeScene, Scene

MODELS = (ModelCard("m"),)


def backend_of(engines: int, **changes: object) -> Backend:
    config = BackendConfig.model_validate({"url": "http://h:8000", **changes})
    backend = Backend(0, config, health=HealthConfig(), random=Random(1))
    backend.learn(Facts(engines=engines, max_num_seqs=64, kv_cache_tokens=1001 * engines, block_size_tokens=32))
    backend.resize_engines(0.0, count(1).__next__)
    return backend


def test_an_engine_has_its_share_and_the_rest_is_its_backends() -> None:
    backend = backend_of(2, relative_cost=2.0, name="b")
    zero, one = backend.engines
    assert (one.name, one.rank, one.index, one.slowness) == ("b", 1, 2, 2.0**0.5)
    assert [engine.cap for engine in (zero, one)] == [64, 64]
    assert [engine.kv_cache_tokens for engine in (zero, one)] == [1001, 1001]
    assert (one.block_tokens, one.caches_prefixes) == (32, True)
    backend.learn(Facts(engines=2, prefix_caching=False))
    backend.resize_engines(0.0, count(3).__next__)
    assert backend.engines == (zero, one)
    assert (one.block_tokens, one.caches_prefixes, one.kv_cache_tokens) == (16, False, None)


@given(engines=st.integers(1, 16), cap=st.integers(1, 300), elapsed=st.floats(0, 60))
def test_shares_add_up_to_what_the_backend_may_be_given_unless_that_is_less_than_one_each(
    engines: int, cap: int, elapsed: float
) -> None:
    backend = backend_of(engines, max_in_flight=cap)
    backend.slow_since_seconds = 100.0
    backend.resize_engines(100.0 + elapsed, count(engines + 1).__next__)
    ranks = backend.engines
    assert sum(engine.cap for engine in ranks) == max(cap, engines)
    limits = [engine.slots for engine in ranks]
    assert sum(limits) == max(backend.limit(100.0 + elapsed), engines)
    assert max(limits) - min(limits) <= 1
    assert all(1 <= limit <= engine.cap for limit, engine in zip(limits, ranks, strict=True))


def test_an_odd_number_of_sequences_is_not_rounded_away() -> None:
    assert [engine.cap for engine in backend_of(2, max_in_flight=5).engines] == [3, 2]
    assert [engine.cap for engine in backend_of(3, max_in_flight=2).engines] == [1, 1, 1]


# In the fleet.


def learn(s: Scene, number: int, engines: int) -> None:
    s.fleet.learned(s.fleet.backends[number], Facts(models=MODELS, engines=engines))


def numbers(s: Scene) -> dict[tuple[str, int | None], int]:
    candidates = s.fleet.candidates("m")
    assert candidates is not None
    return {(engine.name, engine.rank): engine.index for engine in candidates}


def test_a_backend_with_one_engine_is_that_engine(scene: MakeScene) -> None:
    s = scene(2)
    a, b = s.fleet.backends
    assert s.fleet.candidates("m") == [*a.engines, *b.engines]
    [engine] = a.engines
    assert s.fleet.engine(0) is engine
    assert engine.rank is None


def test_engines_of_ranks_get_numbers_after_those_of_the_backends_and_keep_them(scene: MakeScene) -> None:
    s = scene(3)
    learn(s, 1, 2)
    first = numbers(s)
    assert first == {("a", None): 0, ("b", 0): 3, ("b", 1): 4, ("c", None): 2}
    learn(s, 0, 3)
    second = numbers(s)
    assert second.items() >= {("b", 0): 3, ("b", 1): 4, ("c", None): 2}.items()
    assert sorted(second.values()) == [2, 3, 4, 5, 6, 7]
    learn(s, 1, 1)
    assert numbers(s)[("b", None)] == 1
    learn(s, 1, 2)
    assert numbers(s) == second
    assert s.fleet.engine(4) is s.fleet.backends[1].engines[1]


@given(changes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12))
def test_no_two_engines_ever_share_a_number(changes: list[tuple[int, int]]) -> None:
    configs = [BackendConfig(url=f"http://10.0.0.{n}:8000") for n in range(3)]
    fleet = Fleet(configs, HealthConfig(), clock=lambda: 0.0, random=Random(1))
    known: dict[int, tuple[str, int | None]] = {}
    for number, engines in changes:
        fleet.learned(fleet.backends[number], Facts(models=MODELS, engines=engines))
        for backend in fleet.backends:
            for engine in backend.engines:
                assert known.setdefault(engine.index, (engine.name, engine.rank)) == (engine.name, engine.rank)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Facts(models=MODELS), Facts(models=MODELS, engines=2)),
        (Facts(models=MODELS, engines=2), Facts(models=MODELS)),
        (Facts(models=MODELS), Facts(models=MODELS, block_size_tokens=32)),
        (Facts(models=MODELS), Facts(models=MODELS, prefix_caching=False)),
        (Facts(models=MODELS), Facts(models=MODELS, kv_event_sources=())),
    ],
    ids=["more engines", "fewer engines", "other blocks", "no prefix cache", "KV events"],
)
def test_listeners_are_notified_when_facts_of_a_backend_change(before: Facts, after: Facts) -> None:
    config = BackendConfig(url="http://10.0.0.1:8000", max_in_flight=8, kv_cache_tokens=1000)
    fleet = Fleet([config], HealthConfig(), clock=lambda: 0.0, random=Random(1))
    fleet.learned(fleet.backends[0], before)
    heard: list[int] = []
    fleet.on_change.append(lambda: heard.append(1))
    fleet.learned(fleet.backends[0], after)
    assert heard == [1]


def test_an_unknown_model_has_no_engines_and_one_that_none_serves_now_an_empty_list(scene: MakeScene) -> None:
    s = scene(1)
    assert s.fleet.candidates("other") is None
    s.probe(s.fleet.backends[0], ProbeResult.REFUSED, 3)
    assert s.fleet.candidates("m") == []


def test_while_a_backend_has_not_listed_its_models_any_may_be_one_of_them(scene: MakeScene) -> None:
    s = scene(2, up=False)
    assert s.fleet.candidates("other") == []
    for number in (0, 1):
        assert s.fleet.candidates("other") == []
        learn(s, number, 1)
    assert s.fleet.candidates("other") is None
