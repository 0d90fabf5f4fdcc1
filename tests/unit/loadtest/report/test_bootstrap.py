"""Intervals of single runs, against runs whose true figures are known."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from loadtest.drive.record import Record
from loadtest.report.bootstrap import latency_intervals, rate_intervals
from loadtest.report.schema import Bounds
from loadtest.report.series import Spread, series_of_one
from loadtest.report.series_tables import spread_text, tables
from loadtest.report.statistics import percentile
from tests.unit.loadtest.report.runs import records_of, run_of

_SECONDS, _RUNS = 12, 60
_STEP_SECONDS = 0.05


def _level(draw: Random, phase_seconds: float) -> list[float]:
    """How slow the server is at each step: it stays slow, or fast, for about a phase."""
    stays = math.exp(-_STEP_SECONDS / phase_seconds)
    level = [draw.gauss(0, 1)]
    for _ in range(round(2 * _SECONDS / _STEP_SECONDS)):
        level.append(stays * level[-1] + math.sqrt(1 - stays**2) * draw.gauss(0, 1))
    return level


def _run(draw: Random, shared: float, phase_seconds: float = 0.4) -> list[Record]:
    """Six users; `shared`: how much of a request's luck is that of all which the server answers at the time."""
    level, made = _level(draw, phase_seconds), list[Record]()
    for _ in range(6):
        at = draw.random() * 0.3
        while at < _SECONDS:
            luck = shared * level[int(at / _STEP_SECONDS)] + math.sqrt(1 - shared**2) * draw.gauss(0, 1)
            first, end = at + 0.1 * math.exp(0.4 * luck), at + 0.1 * math.exp(0.4 * luck) + 0.2 * math.exp(0.1 * luck)
            tokens = {"completion_tokens": 21, "events": 21, "reads": 21}
            made.append(Record(len(made), -1, at, sent=at, end=end, outcome="ok", first_token=first, **tokens))
            at = end
    return made


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.8])
def test_intervals_of_single_runs_hold_the_true_figures_though_requests_depend_on_each_other(shared: float) -> None:
    draw, random = Random(11), np.random.default_rng(1)
    runs = [_run(draw, shared) for _ in range(_RUNS)]
    ttfts = sorted((record.first_token or 0.0) - record.due for run in runs for record in run)
    window = (1.0, _SECONDS - 1.0)
    rates = [sum(window[0] <= record.end <= window[1] for record in run) / (_SECONDS - 2) for run in runs]
    truth = {"ttft_p50": percentile(ttfts, 50) * 1e3, "requests_per_second": sum(rates) / _RUNS}
    held = dict.fromkeys(truth, 0)
    for run in runs:
        found = latency_intervals(run, (0.0, _SECONDS), random) | rate_intervals(run, None, window, random)
        for name, true in truth.items():
            held[name] += found[name][0] <= true <= found[name][1]
    assert min(held.values()) >= 0.85 * _RUNS, held


def test_intervals_that_take_requests_for_independent_are_far_too_narrow_where_they_are_not() -> None:
    """The reason for whole stretches: the same figures, each request drawn by itself."""
    draw, random = Random(11), np.random.default_rng(1)
    runs = [[(r.first_token or 0.0) - r.due for r in _run(draw, 0.8)] for _ in range(_RUNS)]
    truth = percentile(sorted(ttft for run in runs for ttft in run), 50)
    held = 0
    for run in runs:
        medians = np.median(random.choice(run, (200, len(run))), axis=1)
        low, high = np.quantile(medians, (0.025, 0.975))
        held += bool(low <= truth <= high)
    assert held < 0.8 * _RUNS


def test_percentiles_without_values_beyond_them_have_no_interval() -> None:
    run = _run(Random(1), 0.0)
    assert 200 <= len(run) < 1000
    found = latency_intervals(run, (0.0, _SECONDS), np.random.default_rng(1))
    assert set(found) == {f"{name}_{percent}" for name in ("ttft", "tpot", "e2e") for percent in ("p50", "p95")}


def test_a_run_that_is_short_for_its_requests_has_no_intervals() -> None:
    random = np.random.default_rng(1)
    run = [Record(0, -1, 0.0, sent=0.0, end=2.0, outcome="ok"), Record(1, -1, 0.0, sent=0.0, end=2.5, outcome="ok")]
    for records, window in ((run, (0.0, 2.5)), ([], (0.0, 1.0)), (run, (1.0, 1.0))):
        assert latency_intervals(records, window, random) == rate_intervals(records, None, window, random) == {}


def test_turns_of_a_conversation_count_where_it_begins() -> None:
    """Conversations as long as a stretch are no measurement each second."""
    turns = [
        Record(at // 20, -1, at / 10, sent=at / 10, end=at / 10 + 0.1, outcome="ok", turn=at % 20) for at in range(200)
    ]
    single = [replace(record, index=number) for number, record in enumerate(turns)]
    random = np.random.default_rng(1)
    assert latency_intervals(single, (0.0, 20.0), random)
    assert latency_intervals(turns, (0.0, 20.0), random)
    assert not latency_intervals(turns, (0.0, 10.0), random)


def test_the_same_records_have_the_same_intervals_and_goodput_has_its_own() -> None:
    run = records_of(0.1, count=100)
    slow = [replace(record, first_token=record.sent + 0.3) if record.index % 7 == 0 else record for record in run]
    first, again = (run_of(slow, Bounds(ttft_ms=200)).intervals for _ in range(2))
    assert first == again
    low, high = first["goodput_per_second"]
    assert low < 100 * 6 / 7 / 40 < high
    assert first["requests_per_second"][1] - first["requests_per_second"][0] < high - low
    assert "goodput_per_second" not in run_of(slow).intervals


def test_a_single_run_of_a_series_shows_its_own_interval_and_several_show_that_of_their_mean() -> None:
    point = series_of_one(run_of(records_of(0.1, count=100))).points[0]
    assert point.figures["ttft_p50"].interval == point.figures["ttft_p50"].within_run
    one = Spread(median=100, low=100, high=100, values=[100], within_run=(90, 120))
    assert spread_text("ttft_p50", one) == "100 ms ±20%"
    several = one.model_copy(update={"values": [99, 101]})
    assert several.interval != one.within_run
    (_, _, rates), *_ = tables(series_of_one(run_of(records_of(0.1, count=100))), compact=True)
    assert any("±" in cell for row in rates for cell in row)
