"""Backends that run several engines (data parallel), each a place of its own."""

import pytest

from gateway.core.request import Demand
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import POLICIES, Hall, ask, engine, hall

KEYS, EDGES = (1, 2, 3), (1000, 2000, 4000)
LONG = {"keys": KEYS, "edges": EDGES, "prompt_size": 8000, "prompt_tokens": 2000}


def ranked(policy: str = "prefix", plain: int = 1) -> Hall:
    """Backend `a` of one engine, and `d` of two."""
    here = hall(*[4] * plain, 4, 4, policy=policy)
    for rank, site in enumerate(here.sites[plain:]):
        site.name, site.rank = "d", rank
    return here


def bind(here: Hall, wish: Demand | None = None, avoid: frozenset[str] = frozenset()) -> Lease:
    placed = here.scheduler.place(wish or ask(), here.now, avoid)
    assert isinstance(placed, Lease)
    here.scheduler.first_token(placed, here.now)
    return placed


def where(lease: Lease) -> tuple[str, int | None]:
    return lease.engine.name, lease.engine.rank


@pytest.mark.parametrize("policy", POLICIES)
def test_each_engine_of_a_backend_is_a_place_of_its_own(policy: str) -> None:
    here = ranked(policy)
    assert {where(bind(here)) for _ in range(3)} == {("a", None), ("d", 0), ("d", 1)}
    assert [site.load.in_flight for site in here.sites if site.name == "d"] == [1, 1]


def test_a_prompt_goes_to_the_engine_that_holds_it_not_just_to_its_backend() -> None:
    here = ranked()
    here.index.record(2, KEYS, EDGES)
    placed = bind(here, ask(**LONG))
    assert where(placed) == ("d", 1)
    assert placed.hit_tokens == 992


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_engine_that_the_client_asks_for_is_taken(policy: str, rank: int) -> None:
    here = ranked(policy)
    for _ in range(3):
        assert where(bind(here, ask(rank=rank))) == ("d", rank)


def test_an_unknown_rank_is_ignored() -> None:
    assert where(bind(ranked(), ask(rank=7))) == ("a", None)
    assert where(bind(hall(4, 4), ask(rank=0))) == ("a", None)


def test_a_retry_avoids_all_engines_of_the_backend_that_failed() -> None:
    here = ranked()
    assert {where(bind(here, avoid=frozenset("d"))) for _ in range(4)} == {("a", None)}
    assert {where(bind(here, avoid=frozenset("a"))) for _ in range(4)} == {("d", 0), ("d", 1)}


def test_a_retry_that_asks_for_a_rank_still_avoids_the_backend_that_failed() -> None:
    assert where(bind(ranked(), ask(rank=1), frozenset("d"))) == ("a", None)
    assert where(bind(ranked(plain=0), ask(rank=1), frozenset("d"))) == ("d", 1)


def test_a_pinned_request_may_go_to_any_engine_of_its_backend_or_to_the_one_it_asks_for() -> None:
    here = ranked()
    assert {where(bind(here, ask(pinned="d"))) for _ in range(2)} == {("d", 0), ("d", 1)}
    assert where(bind(here, ask(pinned="d", rank=1))) == ("d", 1)
    assert where(bind(here, ask(pinned="a", rank=1))) == ("a", None)


def test_look_ups_take_nothing_from_any_engine() -> None:
    here = ranked()
    for wish in (ask(sequences=0, pinned="d"), ask(sequences=0, pinned="d", rank=1), ask(sequences=0)):
        placed = bind(here, wish)
        assert placed.engine.load.in_flight == 0
        here.scheduler.release(placed, 1.0)
    for site in here.sites:
        assert repr(site.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"
        assert site.kv.taken_tokens == 0


def test_a_request_waiting_for_an_engine_gets_no_other_of_the_same_backend() -> None:
    here = ranked("least_loaded")
    running = [bind(here, ask(rank=1)) for _ in range(4)]
    ticket = here.scheduler.place(ask(rank=1), 0.0)
    assert isinstance(ticket, Ticket)
    assert here.scheduler.scan_queue("m", 0.0) == []
    here.scheduler.release(running[0], 0.0)
    [(granted, bound)] = here.scheduler.scan_queue("m", 0.0)
    assert granted is ticket
    assert isinstance(bound, Lease)
    assert where(bound) == ("d", 1)


def test_a_backend_that_turns_out_to_run_two_engines_keeps_count_of_what_it_was_given_before() -> None:
    here = hall(4)
    before = [bind(here) for _ in range(3)]
    engines = [engine(1 + rank, 2, "a", rank) for rank in range(2)]
    here.index.resize(2, 1 << 30)
    here.serving["m"] = engines
    here.changed()
    after = [bind(here) for _ in range(3)]
    assert [where(lease) for lease in after] == [("a", 0), ("a", 1), ("a", 0)]
    everything = [*here.sites, *engines]
    assert sum(one.load.in_flight for one in everything) == 6
    for lease in [*before, *after]:
        here.scheduler.first_token(lease, 1.0)
        here.scheduler.release(lease, 1.0)
    assert [one.load.in_flight for one in everything] == [0, 0, 0]


def test_a_request_that_waited_for_a_backend_gets_one_of_its_engines() -> None:
    here = hall(1, policy="prefix")
    running = bind(here)
    ticket = here.scheduler.place(ask(**LONG), 0.0)
    assert isinstance(ticket, Ticket)
    here.index.resize(2, 1 << 30)
    here.index.record(2, KEYS, EDGES)
    engines = here.serving["m"] = [engine(1 + rank, 2, "a", rank) for rank in range(2)]
    here.changed()
    [(granted, bound)] = here.scheduler.scan_queue("m", 0.0)
    assert granted is ticket
    assert isinstance(bound, Lease)
    assert (where(bound), bound.hit_tokens) == (("a", 1), 992)
    here.scheduler.release(running, 1.0)
    here.scheduler.release(bound, 1.0)
    assert [one.load.in_flight for one in [*here.sites, *engines]] == [0, 0, 0]
