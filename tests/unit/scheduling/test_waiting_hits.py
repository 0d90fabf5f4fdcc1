from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request import Ask
from gateway.routing.engine import Engine
from gateway.scheduling.queue_scan import WaitingHits
from gateway.scheduling.wait_queue import Ticket

SEATS = [Engine(0, "a"), Engine(1, "b")]


class Caches:
    """Holds as much of every prompt as it is told to, and counts how often it is asked."""

    def __init__(self) -> None:
        self.held = [0, 0]
        self.looks = 0

    def __call__(self, ask: Ask, engines: Sequence[Engine]) -> list[int]:
        self.looks += 1
        return self.held[: len(engines)]


def ticket(*keys: int) -> Ticket:
    return Ticket(Ask("m", keys=keys), 0.0, frozenset(), 0.0)


@pytest.fixture
def caches() -> Caches:
    return Caches()


@pytest.fixture
def hits(caches: Caches) -> WaitingHits:
    return WaitingHits(caches)


def test_what_was_found_on_arrival_is_not_looked_up_again(caches: Caches, hits: WaitingHits) -> None:
    waiting = ticket(1, 2)
    hits.keep(waiting, [16, 32], SEATS, 0.0)
    assert [found.tolist() for found in hits.of([waiting], SEATS, 0.9)] == [[16.0, 32.0]]
    assert caches.looks == 0


def test_a_look_is_good_for_a_second(caches: Caches, hits: WaitingHits) -> None:
    waiting = ticket(1)
    for now, looks in ((0.0, 1), (0.5, 1), (1.0, 1), (1.1, 2), (2.0, 2), (2.2, 3)):
        hits.of([waiting], SEATS, now)
        assert caches.looks == looks


def test_a_prompt_that_begins_alike_and_is_bound_voids_it(caches: Caches, hits: WaitingHits) -> None:
    alike, other, bare = ticket(1, 2), ticket(3), ticket()
    hits.of([alike, other, bare], SEATS, 0.0)
    hits.bound(Ask("m", keys=(1, 9)), 0.1)
    hits.bound(Ask("m"), 0.1)
    caches.held = [160, 0]
    found = hits.of([alike, other, bare], SEATS, 0.2)
    assert [each.tolist() for each in found] == [[160.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert caches.looks == 4


def test_other_engines_are_looked_at_anew(caches: Caches, hits: WaitingHits) -> None:
    waiting = ticket(1)
    hits.of([waiting], SEATS, 0.0)
    assert hits.of([waiting], SEATS[:1], 0.1)[0].tolist() == [0.0]
    assert caches.looks == 2


def test_what_is_kept_of_bindings_is_of_the_last_two_seconds_though_nobody_looks(hits: WaitingHits) -> None:
    for key in range(20_000):
        hits.bound(Ask("m", keys=(key,)), key / 1000)
        assert len(hits) <= 2003


@given(
    st.lists(
        st.tuples(st.sampled_from(["bound", "look"]), st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.6, 1.0, 1.5])),
        max_size=30,
    )
)
def test_a_hit_is_looked_up_anew_if_it_is_old_or_one_that_begins_alike_was_bound_since(
    steps: list[tuple[str, int, float]],
) -> None:
    caches, now = Caches(), 0.0
    hits, waiting = WaitingHits(caches), [ticket(0), ticket(1), ticket(2)]
    looked: dict[int, float] = {}
    bound: dict[int, float] = {}
    for step, key, seconds in steps:
        now += seconds
        if step == "bound":
            hits.bound(Ask("m", keys=(key,)), now)
            bound[key] = now
            continue
        is_good = key in looked and looked[key] >= now - 1.0 and looked[key] > bound.get(key, -1.0)
        before = caches.looks
        hits.of([waiting[key]], SEATS, now)
        assert caches.looks - before == (not is_good)
        looked[key] = looked[key] if is_good else now
