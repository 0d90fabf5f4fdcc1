from collections.abc import Sequence

import pytest

from gateway.admission.ticket import Ticket
from gateway.admission.waiting_hits import WaitingHits
from gateway.request import Ask
from gateway.routing.seat import Seat

SEATS = [Seat(0, "a"), Seat(1, "b")]


class Caches:
    """Holds as much of every prompt as it is told to, and counts how often it is asked."""

    def __init__(self) -> None:
        self.held = [0, 0]
        self.looks = 0

    def __call__(self, ask: Ask, seats: Sequence[Seat]) -> list[int]:
        self.looks += 1
        return self.held[: len(seats)]


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


def test_what_was_bound_long_ago_is_forgotten(caches: Caches, hits: WaitingHits) -> None:
    waiting = ticket(1)
    for key in range(100):
        hits.bound(Ask("m", keys=(key,)), 0.0)
    hits.of([waiting], SEATS, 5.0)
    hits.of([waiting], SEATS, 5.5)
    assert caches.looks == 1
    assert not hits._bound
