from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request import Demand
from gateway.routing.engine import Engine
from gateway.scheduling.admission import HitCache
from gateway.scheduling.wait_queue import Ticket

ENGINES = [Engine(0, "a"), Engine(1, "b")]


class Caches:
    """Holds a given part of every prompt, and counts look-ups."""

    def __init__(self) -> None:
        self.held = [0, 0]
        self.looks = 0

    def __call__(self, ask: Demand, engines: Sequence[Engine]) -> list[int]:
        self.looks += 1
        return self.held[: len(engines)]


def ticket(*keys: int) -> Ticket:
    return Ticket(Demand("m", keys=keys), 0.0, frozenset(), 0.0)


@pytest.fixture
def caches() -> Caches:
    return Caches()


@pytest.fixture
def hits(caches: Caches) -> HitCache:
    return HitCache(caches)


def test_hits_predicted_on_arrival_are_kept(caches: Caches, hits: HitCache) -> None:
    waiting = ticket(1, 2)
    waiting.keep_hits([16, 32], ENGINES, 0.0)
    assert [found.tolist() for found in hits.of([waiting], ENGINES, 0.9)] == [[16.0, 32.0]]
    assert caches.looks == 0


def test_a_prediction_is_good_for_a_second(caches: Caches, hits: HitCache) -> None:
    waiting = ticket(1)
    for now, looks in ((0.0, 1), (0.5, 1), (1.0, 1), (1.1, 2), (2.0, 2), (2.2, 3)):
        hits.of([waiting], ENGINES, now)
        assert caches.looks == looks


def test_a_prompt_that_begins_alike_and_is_bound_voids_it(caches: Caches, hits: HitCache) -> None:
    alike, other, bare = ticket(1, 2), ticket(3), ticket()
    hits.of([alike, other, bare], ENGINES, 0.0)
    hits.bound(Demand("m", keys=(1, 9)), 0.1)
    hits.bound(Demand("m"), 0.1)
    caches.held = [160, 0]
    found = hits.of([alike, other, bare], ENGINES, 0.2)
    assert [each.tolist() for each in found] == [[160.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert caches.looks == 4


def test_other_engines_need_a_new_prediction(caches: Caches, hits: HitCache) -> None:
    waiting = ticket(1)
    hits.of([waiting], ENGINES, 0.0)
    assert hits.of([waiting], ENGINES[:1], 0.1)[0].tolist() == [0.0]
    assert caches.looks == 2


def test_what_is_kept_of_bindings_is_of_the_last_two_seconds_without_any_prediction(hits: HitCache) -> None:
    for key in range(20_000):
        hits.bound(Demand("m", keys=(key,)), key / 1000)
        assert len(hits) <= 2003


@given(
    st.lists(
        st.tuples(st.sampled_from(["bound", "look"]), st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.6, 1.0, 1.5])),
        max_size=30,
    )
)
def test_a_hit_is_predicted_again_if_it_is_old_or_one_that_begins_alike_was_bound_since(
    steps: list[tuple[str, int, float]],
) -> None:
    caches, now = Caches(), 0.0
    hits, waiting = HitCache(caches), [ticket(0), ticket(1), ticket(2)]
    looked: dict[int, float] = {}
    bound: dict[int, float] = {}
    for step, key, seconds in steps:
        now += seconds
        if step == "bound":
            hits.bound(Demand("m", keys=(key,)), now)
            bound[key] = now
            continue
        is_good = key in looked and looked[key] >= now - 1.0 and looked[key] > bound.get(key, -1.0)
        before = caches.looks
        hits.of([waiting[key]], ENGINES, now)
        assert caches.looks - before == (not is_good)
        looked[key] = looked[key] if is_good else now
