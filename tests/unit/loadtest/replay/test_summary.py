"""Figures, ratios and capacity on cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.replay.grid import WANTED_GOODPUT, Kept, find_capacity, ideal_rate
from loadtest.replay.scenario import EngineFaults
from loadtest.replay.simulation import engines_of, replay
from loadtest.replay.summary import Percentiles, PolicyFigures, figures_of, ratios
from loadtest.workloads.trace import Row, Trace
from tests.unit.loadtest.replay.builders import BLOCK, conversation_trace, request, scenario


def _answered(number: int, ttft: float, tpot: float, engine: int = 0, cached: int = 0) -> object:
    made = request(number, prompt_tokens=640, output_tokens=11)
    made.arrival_seconds = float(number)
    made.first_token_seconds = number + ttft
    made.finished_seconds = made.first_token_seconds + 10 * tpot
    made.engine, made.cached_tokens, made.sent_seconds = engine, cached, made.arrival_seconds
    return made


def test_the_first_tenth_does_not_count_and_bounds_are_kept_by_both_figures() -> None:
    at = scenario(engines=2)
    bound = 0.5 + 1.5 * at.cold_prefill_seconds(640)
    requests = [_answered(0, 99.0, 9.0)]
    requests += [_answered(n, 0.1, 0.01, engine=n % 2, cached=320) for n in range(1, 8)]
    requests += [_answered(8, bound + 0.01, 0.01), _answered(9, 0.1, 0.041)]
    figures = figures_of(requests, at, engines_of(at, BLOCK), 1.0)  # type: ignore[arg-type]
    assert figures.requests == 9
    assert figures.goodput == pytest.approx(7 / 9)
    assert figures.goodput_per_second == pytest.approx(7 / (figures.virtual_seconds - 1))
    assert figures.output_tokens_per_second == pytest.approx(10 * 11 / figures.virtual_seconds)
    assert (figures.ttft_violations, figures.tpot_violations) == pytest.approx((1 / 9, 1 / 9))
    assert figures.hit_ratio == pytest.approx(7 * 320 / (9 * 640))
    assert figures.tpot.mean == pytest.approx((8 * 0.01 + 0.041) / 9)
    assert figures.e2e.p50 == pytest.approx(0.2)
    # engine 1 computed 4 x 320, engine 0 3 x 320 + 2 x 640
    assert figures.prefill_imbalance == pytest.approx(2240 / ((2240 + 1280) / 2))


def test_the_minute_after_engines_joined_is_split_by_engine() -> None:
    at = scenario(engines=1, faults=EngineFaults(join_at=0.5, join_engines=1))
    requests = [_answered(n, 0.4, 0.01) for n in range(5)]
    requests += [_answered(n, 0.1 if n % 4 else 0.3, 0.01, engine=n % 4 == 0, cached=320) for n in range(5, 70)]
    joined = figures_of(requests, at, engines_of(at, BLOCK), 1.0, join_seconds=5.0).join  # type: ignore[arg-type]
    assert joined is not None
    assert joined.ttft_before.mean == pytest.approx(0.4)
    assert joined.share_new == pytest.approx(15 / 60)  # those of the seconds 5 to 64
    assert joined.ttft_new.mean == pytest.approx(0.3)
    assert joined.ttft.mean == pytest.approx((15 * 0.3 + 45 * 0.1) / 60)
    assert joined.hit_ratio == joined.hit_ratio_new == pytest.approx(0.5)


def _figures(ttft: float, goodput: float) -> PolicyFigures:
    spread = Percentiles(ttft, ttft, ttft, p99=ttft)
    return PolicyFigures(
        9,
        ttft=spread,
        tpot=spread,
        e2e=spread,
        goodput=goodput,
        ttft_violations=0.0,
        tpot_violations=0.0,
        hit_ratio=0.0,
        preemptions=0,
        prefill_imbalance=1.0,
        virtual_seconds=1.0,
        cpu_seconds=1.0,
    )


def test_ratios_are_geometric_means() -> None:
    found = ratios([(_figures(1.0, 1.0), _figures(2.0, 0.95)), (_figures(4.0, 0.9), _figures(2.0, 0.9))])
    assert found.ttft == pytest.approx(1.0)
    assert found.violations == pytest.approx((0.01 / 0.06 * 1.0) ** 0.5)


def test_the_ideal_rate_is_that_of_engines_that_are_always_busy() -> None:
    trace = Trace("t", [Row(float(n), 2 * BLOCK, 1, keys=(1, 2)) for n in range(100)], BLOCK)
    at = scenario(engines=3)
    step = at.step_time
    cold = step.prefill_seconds(2 * BLOCK, 0) + step.decode_seconds(1, 2 * BLOCK)
    warm = step.prefill_seconds(1, 2 * BLOCK - 1) + step.decode_seconds(1, 2 * BLOCK)
    assert ideal_rate(trace, at) == pytest.approx(3 * 0.8 * 100 / (cold + 99 * warm))


def test_capacity_is_where_the_reference_keeps_its_bounds_for_nine_in_ten() -> None:
    trace, at = conversation_trace(rows=600), scenario(engines=2)
    rate = find_capacity(trace, at)
    assert replay(trace, replace(at, rate_per_second=rate), "lmetric").goodput >= WANTED_GOODPUT
    assert replay(trace, replace(at, rate_per_second=rate * 1.25), "lmetric").goodput < WANTED_GOODPUT


def test_capacities_are_kept_for_the_same_trace_and_engines_alone(tmp_path: Path) -> None:
    kept, trace, at = Kept(tmp_path / "deep" / "kept.json"), conversation_trace(), scenario()
    assert kept.get(trace, at) is None
    kept.put(trace, at, 12.5)
    assert kept.get(trace, replace(at, seed=4, rate_per_second=3.0)) == 12.5
    assert kept.get(trace, replace(at, kv_tokens=1000)) is None
    assert kept.get(conversation_trace(seed=2), at) is None
    (tmp_path / "deep" / "kept.json").write_text("nonsense", encoding="utf-8")
    assert kept.get(trace, at) is None
