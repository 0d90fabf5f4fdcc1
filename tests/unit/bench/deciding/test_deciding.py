"""The loads under which decisions are timed are what they are said to be."""

from itertools import islice

from gateway.core.routing.estimates import Estimates
from tests.bench.deciding import measure
from tests.bench.deciding.fleet import Busy
from tests.bench.deciding.results import Timing, table
from tests.bench.deciding.traffic import asks, bodies


def test_requests_have_4k_to_16k_tokens_and_share_prefixes_in_groups() -> None:
    found = asks(Estimates(), 1000)
    assert 3_900 < min(ask.prompt_tokens for ask in found) < max(ask.prompt_tokens for ask in found) < 16_500
    assert all(ask.keys and ask.streams for ask in found)
    assert len({ask.keys for ask in found}) == len(found)
    assert len({ask.keys[10] for ask in found}) <= 500  # a hundred groups of each size


def test_bodies_have_the_size_that_is_asked_for() -> None:
    assert all(0.97 * 200_000 < len(body) < 1.03 * 200_000 for body in islice(bodies(2, [200_000]), 2))


def test_a_request_is_bound_at_once_where_half_of_it_is_cached() -> None:
    busy = Busy(4, cap=64, scan=64, prompts=1000)
    busy.know_all_prompts()
    busy.load(40)
    assert len(busy.held) == 40
    busy.load(60)
    hits = [lease.hit_tokens for lease in busy.held[40:]]
    assert sum(hit > 1000 for hit in hits) >= 5


def test_a_full_fleet_has_no_slot_and_a_line_of_fresh_requests() -> None:
    busy = Busy(3, cap=8, scan=64, prompts=120)
    busy.know_all_prompts()
    busy.fill(40)
    assert [engine.load.in_flight for engine in busy.engines] == [8, 8, 8]
    assert busy.waiting == 40
    assert all(busy.now - ticket.arrived_seconds < 30 for ticket in busy.queue)
    busy.give_one_back()
    busy.drain()
    assert len(busy.held) == 24


def test_every_timing_can_be_taken() -> None:
    timings = [
        measure.placing(2, runs=5, goal_us=1e9),
        measure.draining(2, scan=8, runs=5),
        measure.keying(runs=5, goal_us=1e-9),
        measure.reading(runs=5),
    ]
    assert all(0 < one.median_us <= one.p99_us for one in timings)
    assert [one.met for one in timings] == [True, None, False, None]


def test_only_what_is_timed_is_timed_and_warm_ups_do_not_count() -> None:
    order: list[str] = []
    found = measure.timed(
        "x", 3, lambda: order.append("prepare"), lambda _: order.append("act"), lambda _: order.append("settle")
    )
    assert order[:3] == ["prepare", "act", "settle"]
    assert len(order) == 3 * (3 + 50)
    assert found.runs == 3


def test_the_table_says_which_goals_are_met() -> None:
    shown = table(
        [
            Timing(name="a", runs=1, median_us=40.04, p99_us=1234.5, goal_us=50),
            Timing(name="b", runs=1, median_us=51, p99_us=60, goal_us=50),
            Timing(name="c", runs=1, median_us=1, p99_us=2),
        ]
    )
    assert "| a | 40.0 | 1,234.5 | ≤ 50 | met |" in shown
    assert "| b | 51.0 | 60.0 | ≤ 50 | **not met** |" in shown
    assert "| c | 1.0 | 2.0 |  |  |" in shown
