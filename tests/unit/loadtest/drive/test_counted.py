"""Engines' own counters are added up over labels and over engines."""

import pytest

from loadtest.drive.counted import hit_ratio, hits, least_share, of_each, preemptions, served

COUNTERS = {
    'engine-1 vllm:prefix_cache_hits_total{engine="0",model_name="a b"}': 300.0,
    'engine-1 vllm:prefix_cache_queries_total{engine="0",model_name="a b"}': 400.0,
    'engine-2 vllm:prefix_cache_hits_total{engine="0",model_name="a b"}': 100.0,
    'engine-2 vllm:prefix_cache_queries_total{engine="0",model_name="a b"}': 600.0,
    'engine-1 vllm:request_success_total{finished_reason="stop"}': 2.0,
    'engine-1 vllm:request_success_total{finished_reason="length"}': 1.0,
    'engine-2 vllm:request_success_total{finished_reason="length"}': 6.0,
    "engine-2 vllm:num_preemptions_total": 4.0,
    "engine-2 vllm:external_prefix_cache_hits_total": 9.0,
}


def test_hits_are_those_of_all_engines_over_all_tokens_that_were_looked_up() -> None:
    assert hits(COUNTERS) == 400
    assert hit_ratio(COUNTERS) == pytest.approx(0.4)
    assert hit_ratio({}) is None
    assert preemptions(COUNTERS) == 4


def test_each_engine_has_its_own_requests() -> None:
    by_engine = of_each(COUNTERS, ["engine-1", "engine-2"])
    assert [served(one) for one in by_engine] == [3, 6]
    assert [hit_ratio(one) for one in by_engine] == [pytest.approx(0.75), pytest.approx(1 / 6)]


def test_a_single_engine_has_no_name_before_its_counters() -> None:
    assert of_each({"vllm:num_preemptions_total": 1.0}, ["engine-1"]) == [{"vllm:num_preemptions_total": 1.0}]


def test_the_least_used_engine_is_held_against_an_even_share() -> None:
    assert least_share([3, 6]) == pytest.approx(2 / 3)
    assert least_share([5, 5]) == 1
    assert least_share([0, 8]) == 0
    assert least_share([4]) is None
    assert least_share([0, 0]) is None
