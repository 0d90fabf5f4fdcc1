"""Every peer's rule on figures that can be worked out by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from loadtest.replay.engine import ReplayEngine
from loadtest.replay.policies import (
    BoundedLoadRing,
    CacheAware,
    DynamoCost,
    LeastInFlight,
    LMetric,
    PowerOfTwoChoices,
    RoundRobin,
    WeightedScores,
    active_request_profile,
    active_request_scores,
    default_profile,
    kv_scores,
    prefix_scores,
    queue_scores,
)
from tests.unit.loadtest.replay.builders import BLOCK, request, scenario, site
from tests.unit.loadtest.replay.stub_view import StubView


@pytest.fixture(name="engine")
def _engine() -> ReplayEngine:
    return site(scenario(engines=1)).engines[0]


def test_round_robin_takes_each_engine_in_turn(engine: ReplayEngine) -> None:
    rule, views = RoundRobin(), [StubView(engine, index) for index in range(3)]
    assert [rule.choose(request(n), views) for n in range(5)] == [0, 1, 2, 0, 1]


def test_least_in_flight_takes_the_emptiest_and_draws_between_equals(engine: ReplayEngine) -> None:
    rule = LeastInFlight(random.Random(0))
    views = [StubView(engine, index, in_flight=count) for index, count in enumerate((2, 1, 1, 3))]
    assert {rule.choose(request(n), views) for n in range(50)} == {1, 2}


def test_two_choices_never_take_the_fullest_of_three(engine: ReplayEngine) -> None:
    rule = PowerOfTwoChoices(random.Random(0))
    views = [StubView(engine, index, in_flight=count) for index, count in enumerate((1, 9, 2))]
    assert {rule.choose(request(n), views) for n in range(50)} == {0, 2}
    assert rule.choose(request(), views[:1]) == 0


def test_lmetric_multiplies_prefill_by_the_batch(engine: ReplayEngine) -> None:
    prompt = request(prompt_tokens=640)
    # (0 + 640) x 3 = 1920;  (500 + 128) x 3 = 1884;  (0 + 640) x 4 = 2560
    views = [
        StubView(engine, 0, in_flight=2),
        StubView(engine, 1, in_flight=2, prefill_tokens=500, held=8),
        StubView(engine, 2, in_flight=3),
    ]
    rule = LMetric(random.Random(0))
    assert rule.choose(prompt, views) == 1
    views[1].prefill_tokens = 520  # (520 + 128) x 3 = 1944
    assert rule.choose(prompt, views) == 0


def test_a_prompt_that_is_held_whole_still_costs_one_token(engine: ReplayEngine) -> None:
    assert StubView(engine, 0, held=10).uncached_tokens(request(prompt_tokens=640)) == 1


def test_llm_d_scores_are_shares(engine: ReplayEngine) -> None:
    prompt = request(prompt_tokens=640)
    views = [
        StubView(engine, 0, held=10, waiting=4, kv_usage=0.5, in_flight=4),
        StubView(engine, 1, held=5, waiting=2, kv_usage=0.25, in_flight=1),
        StubView(engine, 2, waiting=0, kv_usage=0.0, in_flight=0),
    ]
    assert prefix_scores(prompt, views) == [1.0, 0.5, 0.0]
    assert queue_scores(prompt, views) == [0.0, 0.5, 1.0]
    assert kv_scores(prompt, views) == [0.5, 0.75, 1.0]
    assert active_request_scores(prompt, views) == [0.0, 0.75, 1.0]


def test_llm_d_scores_of_equal_queues_and_of_no_blocks(engine: ReplayEngine) -> None:
    views = [StubView(engine, 0, waiting=3), StubView(engine, 1, waiting=3)]
    assert queue_scores(request(), views) == [1.0, 1.0]
    assert active_request_scores(request(), views) == [1.0, 1.0]
    assert prefix_scores(request(prompt_tokens=5), views) == [0.0, 0.0]


def test_llm_d_profiles_weigh_their_scores(engine: ReplayEngine) -> None:
    # 3:2:2   3 x 1 + 2 x 0 + 2 x 0.5 = 4      3 x 0 + 2 x 1 + 2 x 1 = 4.0 -> lowered to 3.9 by usage
    views = [
        StubView(engine, 0, held=10, waiting=4, kv_usage=0.5, in_flight=4),
        StubView(engine, 1, waiting=0, kv_usage=0.05, in_flight=0),
    ]
    assert default_profile(random.Random(0)).choose(request(), views) == 0
    # 2:1:1   2 x 1 + 0 + 0.5 = 2.5            0 + 1 + 0.95 = 1.95
    assert active_request_profile(random.Random(0)).choose(request(), views) == 0
    only_queue = WeightedScores(((1.0, queue_scores),), random.Random(0))
    assert only_queue.choose(request(), views) == 1


def test_dynamo_adds_prefill_blocks_and_active_blocks(engine: ReplayEngine) -> None:
    rule = DynamoCost(2, BLOCK, random.Random(0))
    views = [StubView(engine, 0), StubView(engine, 1, prefill_tokens=10 * BLOCK)]
    first = request(1, prompt_tokens=10 * BLOCK + 1)
    # 0: 10.02 + 11 active;  1: 20.02 + 11
    assert rule.choose(first, views) == 0
    views[1].prefill_tokens = 0
    # The same prompt again: its ten named blocks are active on 0 already, its partial one is its own.
    # 0: 10.02 + (11 + 1);  1: 10.02 + 11
    assert rule.choose(request(2, first.prompt_tokens, keys=first.keys), views) == 1
    # 0: (4 held) 6.02 + 12;  1: 10.02 + 12
    views[0] = StubView(engine, 0, held=4)
    assert rule.choose(request(3, first.prompt_tokens, keys=first.keys), views) == 0


def test_dynamo_forgets_the_blocks_of_answered_requests(engine: ReplayEngine) -> None:
    rule, views = DynamoCost(1, BLOCK, random.Random(0)), [StubView(engine, 0)]
    sent = [request(n, 10 * BLOCK + n, keys=range(8 + n % 3)) for n in range(6)]
    for each in sent:
        rule.choose(each, views)
    for each in sent:
        rule.released(each)
    assert rule._references == [{}]
    assert rule._unnamed == [0]
    assert not rule._sent


def _cache_aware(tree_tokens: int = 1 << 20) -> CacheAware:
    return CacheAware(2, BLOCK, tree_tokens, rng=random.Random(0))


def test_cache_aware_follows_a_match_above_the_threshold_and_else_the_least_load(engine: ReplayEngine) -> None:
    rule, views = _cache_aware(), [StubView(engine, 0), StubView(engine, 1, in_flight=1)]
    assert rule.choose(request(1), views) == 0  # nothing matches
    views[0].in_flight = 2
    assert rule.choose(request(2), views) == 1
    assert rule.choose(request(3, keys=request(1).keys), views) == 0
    # 4 of 10 blocks match: above 0.3
    assert rule.choose(request(4, keys=[*request(1).keys[:4], *range(900_000, 900_006)]), views) == 0
    # 3 of 10 do not
    assert rule.choose(request(5, keys=[*request(1).keys[:3], *range(910_000, 910_007)]), views) == 1


def test_cache_aware_draws_between_engines_with_the_same_match(engine: ReplayEngine) -> None:
    rule, views = _cache_aware(), [StubView(engine, 0), StubView(engine, 1, in_flight=100)]
    keys = request(1).keys
    assert rule.choose(request(1), views) == 0
    views[0].in_flight = 200
    assert rule.choose(request(2, keys=keys), views) == 1  # out of balance
    views[1].in_flight = 200
    assert {rule.choose(request(number, keys=keys), views) for number in range(3, 30)} == {0, 1}


def test_cache_aware_forgets_what_was_used_least_recently_once_a_second(engine: ReplayEngine) -> None:
    rule, views = _cache_aware(tree_tokens=15 * BLOCK), [StubView(engine, 0), StubView(engine, 1, in_flight=1)]
    for number in (1, 2):
        assert rule.choose(request(number), views) == 0
    views[0].in_flight = 2
    late = request(3, keys=request(2).keys)
    late.arrive(1.0)
    assert rule.choose(late, views) == 0
    # The first prompt lost five of its ten blocks, the ones at its end.
    assert len(rule._trees[0]) == 15
    assert sorted(rule._holders) == [*request(1).keys[:5], *request(2).keys]


@pytest.mark.parametrize(
    ("holders_load", "others_load", "balanced"),
    [(64, 0, True), (65, 0, False), (200, 133, False), (200, 134, True), (300, 210, True)],
)
def test_cache_aware_looks_at_load_alone_when_out_of_balance(
    engine: ReplayEngine, holders_load: int, others_load: int, balanced: bool
) -> None:
    rule, views = _cache_aware(), [StubView(engine, 0), StubView(engine, 1)]
    holder = rule.choose(request(1), views)
    views[holder].in_flight, views[1 - holder].in_flight = holders_load, others_load
    assert rule.choose(request(2, keys=request(1).keys), views) == (holder if balanced else 1 - holder)


def test_ring_keeps_an_opening_on_one_engine_while_loads_allow(engine: ReplayEngine) -> None:
    rule, views = BoundedLoadRing(4), [StubView(engine, index) for index in range(4)]
    home = rule.choose(request(1), views)
    assert rule.choose(request(2, keys=request(1).keys), views) == home
    # total 7: the bound is 8 / 4 x 1.25 = 2.5, so one with 2 in flight is passed over, one with 1 is not
    for view in views:
        view.in_flight = 1
    views[home].in_flight = 2
    views[(home + 1) % 4].in_flight = 3
    assert rule.choose(request(1), views) not in (home, (home + 1) % 4)
    views[home].in_flight, views[(home + 2) % 4].in_flight = 1, 2
    assert rule.choose(request(1), views) == home


def test_ring_spreads_openings(engine: ReplayEngine) -> None:
    rule, views = BoundedLoadRing(4), [StubView(engine, index) for index in range(4)]
    homes = Counter(rule.choose(request(n), views) for n in range(2000))
    assert min(homes.values()) > 300
