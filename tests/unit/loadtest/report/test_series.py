"""Several runs reported together."""

from __future__ import annotations

import io
from array import array
from collections import Counter

import pytest
from rich.console import Console

from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record, WorkerHealth
from loadtest.report.pages import series_page
from loadtest.report.schema import Bounds, Environment
from loadtest.report.series import Ran, Series, series_of
from loadtest.report.series_tables import run_line, tables
from loadtest.report.summarise import summarise
from loadtest.report.terminal import show_series
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of

_ENVIRONMENT = Environment(versions={}, command=["loadtest"], started_at="2026", host={}, server={})


def _ran(target: str, rate: float, repetition: int, ttft: float, *, lag: float = 0.001, fails: int = 0) -> Ran:
    records = [
        Record(
            i,
            0,
            i / rate,
            sent=i / rate,
            end=i / rate + ttft + 0.1,
            outcome="ok",
            first_token=i / rate + ttft,
            completion_tokens=5,
        )
        for i in range(20)
    ]
    records += [Record(20 + i, 0, 0.0, sent=0.0, end=0.1, outcome="http_503", detail="no") for i in range(fails)]
    plan = Plan.model_validate({"url": "http://x", "model": "m", "requests": 20, "rate_per_second": rate})
    health = WorkerHealth(0, array("d", [lag]), array("d", [0.2]))
    harvest = Harvest(records, Counter(), [health])
    results = summarise(plan, harvest, Bounds(ttft_ms=400, max_error_ratio=0.5), _ENVIRONMENT, {})
    return Ran(target, f"r{rate:g}", repetition, results=results)


def _series(*ran: Ran) -> Series:
    return series_of(ran, _ENVIRONMENT)


def test_a_point_has_the_median_and_the_spread_of_its_repetitions() -> None:
    (point,) = _series(*(_ran("", 5, n, ttft) for n, ttft in enumerate((0.3, 0.1, 0.2)))).points
    spread = point.figures["ttft_p50"]
    assert (spread.low, spread.median, spread.high) == pytest.approx((100, 200, 300))
    assert (point.offered, point.runs, point.valid, point.passed) == (5, 3, 3, 3)


def test_tables_show_the_median_with_the_confidence_interval_of_the_mean() -> None:
    several = _series(*(_ran("", 5, n, ttft) for n, ttft in enumerate((0.18, 0.2, 0.22))))
    one = _series(_ran("", 5, 0, 0.2))
    _, head, (row,) = tables(several)[1]
    column = head.index("TTFT p50")
    assert row[column] == "200 ms ±25%"  # 4.303 x 20 ms / sqrt(3)
    assert tables(one)[1][2][0][column] == "200 ms"


def test_tables_show_both_values_of_two_runs() -> None:
    two = _series(_ran("", 5, 0, 0.18), _ran("", 5, 1, 0.22))
    shown = {compact: tables(two, compact=compact)[1] for compact in (False, True)}
    column = shown[False][1].index("TTFT p50")
    assert shown[False][2][0][column] == "200 ms (180 ms and 220 ms)"
    assert shown[True][2][0][column] == "200 ms"


def test_differences_that_repetitions_do_not_separate_from_nothing_are_ties() -> None:
    ran = [_ran("direct", 5, n, 0.2) for n in range(3)]
    ran += [_ran("near", 5, n, ttft) for n, ttft in enumerate((0.19, 0.2, 0.22))]
    ran += [_ran("far", 5, n, ttft) for n, ttft in enumerate((0.29, 0.3, 0.31))]
    *_, less, ratio = tables(_series(*ran))
    shown = {row[0]: row[less[1].index("TTFT p50")] for row in less[2]}
    assert shown == {"near": "+0.00 ms ±41.3 ms, tie", "far": "+100 ms ±24.8 ms"}
    shown = {row[0]: row[ratio[1].index("TTFT p50")] for row in ratio[2]}
    assert shown == {"near": "1.000 ±0.206, tie", "far": "1.500 ±0.124"}


def test_targets_are_compared_pair_by_pair_so_that_drift_does_not_count() -> None:
    drift = (0.1, 0.2, 0.3)
    ran = [_ran("direct", 5, n, ttft) for n, ttft in enumerate(drift)]
    ran += [_ran("gateway", 5, n, ttft + 0.01) for n, ttft in enumerate(drift)]
    (difference,) = _series(*ran).differences
    spread = difference.figures["ttft_p50"]
    assert (difference.target, difference.against, difference.pairs) == ("gateway", "direct", 3)
    assert (spread.low, spread.median, spread.high) == pytest.approx((10, 10, 10))
    ratio = difference.ratios["ttft_p50"]
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.31 / 0.3, 0.21 / 0.2, 0.11 / 0.1))


def test_a_run_that_the_client_spoilt_has_no_figures_and_fails_the_series() -> None:
    series = _series(_ran("", 5, 0, 0.1), _ran("", 5, 1, 9.0, lag=0.9))
    (point,) = series.points
    assert (point.valid, point.figures["ttft_p50"].high) == (1, pytest.approx(100))
    assert not series.passed
    assert [reason.split(": event")[0] for reason in series.reasons] == ["r5: 1 of 2 runs are invalid: client worker 0"]


def test_a_load_above_what_is_carried_is_a_finding_but_carrying_none_is_a_failure() -> None:
    assert _series(_ran("", 5, 0, 0.1), _ran("", 10, 0, 0.9)).passed
    beaten = _series(_ran("a", 5, 0, 0.1), _ran("b", 5, 0, 0.9), _ran("a", 10, 0, 0.1), _ran("b", 10, 0, 0.9))
    assert beaten.reasons == ["b: no load passed in all its runs"]
    assert _series(_ran("", 5, 0, 0.9)).reasons == ["not all runs passed"]


def test_goodput_by_offered_load_is_drawn_and_every_run_is_linked() -> None:
    ran = [_ran(target, rate, n, rate / 20) for n in range(2) for rate in (2, 4, 10) for target in ("direct", "<gw>")]
    series = _series(*ran)
    html = series_page(series, series.folders)

    assert_it_needs_nothing(html, [f"{folder}/report.html" for folder in series.folders])
    assert [plot["title"] for plot in plots_of(html)] == [
        "Output tokens/s, as a ratio to direct",
        "Requests/s, as a ratio to direct",
        "TTFT p50, as a ratio to direct",
        "E2E p50, as a ratio to direct",
        "Goodput by requests/s offered",
        "TTFT p95 by requests/s offered",
        "TPOT p95 by requests/s offered",
        "E2E p95 by requests/s offered",
        "Throughput against latency",
    ]
    assert "<gw>" not in html
    goodput = {point.offered: point.figures["goodput_per_second"].median for point in series.points}
    assert goodput[10] == 0 < goodput[2] < goodput[4]


def test_the_terminal_shows_the_tables_and_a_line_for_each_run() -> None:
    ran = [_ran("direct", 2, 0, 0.1, fails=2), _ran("gateway", 2, 0, 0.2)]
    file = io.StringIO()
    show_series(_series(*ran), Console(file=file, width=80))
    shown = file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    for expected in ("goodput", "gateway", "+100", "1/1", "0/1"):
        assert expected in shown
    assert run_line("direct-r2-1", ran[0].results).startswith("direct-r2-1: ")
    assert "TTFT p50 100" in run_line("x", ran[0].results)


def test_a_series_survives_its_json() -> None:
    series = _series(_ran("a", 5, 0, 0.1), _ran("b", 5, 0, 0.2))
    assert Series.model_validate_json(series.model_dump_json()) == series
