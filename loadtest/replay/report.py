"""A grid's results: tables for the terminal, one HTML page that needs no network, and an SVG of limits.

The SVG has throughput, TTFT and preemptions over the limit of each engine; arms without a limit are level lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.table import Table

from loadtest.console import plain_table
from loadtest.replay.gateway_router import parted
from loadtest.replay.grid import GridResults
from loadtest.replay.summary import PolicyFigures
from loadtest.report.chart import (
    X_END,
    X_START,
    Y_END,
    Y_START,
    Axis,
    Chart,
    ChartSeries,
    Point,
    doubling,
    linear,
    logarithmic,
    nice_top,
)
from loadtest.report.document import render
from loadtest.report.formatting import milliseconds, number, percent
from loadtest.report.sheet import sheet, style

_Columns = tuple[tuple[str, Callable[[PolicyFigures], float], Callable[[float], str]], ...]
_COLUMNS: _Columns = (
    ("TTFT mean", lambda f: f.ttft.mean * 1e3, milliseconds),
    ("p50", lambda f: f.ttft.p50 * 1e3, milliseconds),
    ("p99", lambda f: f.ttft.p99 * 1e3, milliseconds),
    ("TPOT mean", lambda f: f.tpot.mean * 1e3, milliseconds),
    ("p99", lambda f: f.tpot.p99 * 1e3, milliseconds),
    ("E2E mean", lambda f: f.e2e.mean * 1e3, milliseconds),
    ("p99", lambda f: f.e2e.p99 * 1e3, milliseconds),
    ("SLO missed", lambda f: f.violations, percent),
    ("goodput", lambda f: f.goodput, percent),
    ("hit", lambda f: f.hit_ratio, percent),
    ("max/mean prefill", lambda f: f.prefill_imbalance, lambda value: f"{value:.2f}"),
)
_ADMISSION: _Columns = (
    ("preempted", lambda f: float(f.preemptions), number),
    ("recomputed", lambda f: float(f.recomputed_tokens), number),
    ("running", lambda f: f.mean_running, lambda value: f"{value:.1f}"),
    ("most waiting", lambda f: float(f.most_waiting), number),
    ("waited p99", lambda f: f.waited_p99_seconds * 1e3, milliseconds),
    ("TTFT p99", lambda f: f.ttft.p99 * 1e3, milliseconds),
    ("TPOT p99", lambda f: f.tpot.p99 * 1e3, milliseconds),
    ("goodput", lambda f: f.goodput, percent),
    ("good/s", lambda f: f.goodput_per_second, lambda value: f"{value:.2f}"),
    ("tokens/s", lambda f: f.output_tokens_per_second, number),
)
_JOIN: _Columns = (
    ("before: TTFT mean", lambda f: f.join.ttft_before.mean * 1e3 if f.join else 0.0, milliseconds),
    ("p99", lambda f: f.join.ttft_before.p99 * 1e3 if f.join else 0.0, milliseconds),
    ("after: mean", lambda f: f.join.ttft.mean * 1e3 if f.join else 0.0, milliseconds),
    ("p99", lambda f: f.join.ttft.p99 * 1e3 if f.join else 0.0, milliseconds),
    ("hit", lambda f: f.join.hit_ratio if f.join else 0.0, percent),
    ("on new engines", lambda f: f.join.share_new if f.join else 0.0, percent),
    ("mean there", lambda f: f.join.ttft_new.mean * 1e3 if f.join else 0.0, milliseconds),
    ("p99", lambda f: f.join.ttft_new.p99 * 1e3 if f.join else 0.0, milliseconds),
    ("hit", lambda f: f.join.hit_ratio_new if f.join else 0.0, percent),
)
FIGURES_HEAD = ("policy", *(name for name, _, _ in _COLUMNS))
ADMISSION_HEAD = ("policy", *(name for name, _, _ in _ADMISSION))
JOIN_HEAD = ("policy", *(name for name, _, _ in _JOIN))
RATIOS_HEAD = ("policy", "TTFT", "p50", "p99", "TPOT", "p99", "E2E", "SLO missed")


def figure_rows(results: GridResults, engines: int, load: float) -> list[list[str]]:
    """A row for each policy, means over the seeds."""
    return _rows(results, engines, load, _COLUMNS)


def admission_rows(results: GridResults, engines: int, load: float) -> list[list[str]]:
    """The same, of what the engines' memory and batches came to."""
    return _rows(results, engines, load, _ADMISSION)


def join_rows(results: GridResults, engines: int, load: float) -> list[list[str]]:
    """The same, of the minutes before and after engines joined; empty if none did."""
    has_join = any(outcome.figures.join is not None for outcome in results.outcomes)
    return _rows(results, engines, load, _JOIN) if has_join else []


def _rows(results: GridResults, engines: int, load: float, columns: _Columns) -> list[list[str]]:
    rows = []
    for policy in results.policies:
        values = [results.mean(engines, load, policy, figure) for _, figure, _ in columns]
        if values[0] is not None:
            shown = [write(value) for value, (_, _, write) in zip(values, columns, strict=True) if value is not None]
            rows.append([policy, *shown])
    return rows


def ratio_rows(results: GridResults) -> list[list[str]]:
    """A row for each policy: geometric means against the baseline."""
    rows = []
    for policy in results.policies:
        found = results.ratios(policy)
        if found is not None:
            values = (
                found.ttft,
                found.ttft_p50,
                found.ttft_p99,
                found.tpot,
                found.tpot_p99,
                found.e2e,
                found.violations,
            )
            rows.append([policy, *(f"{value:.3f}" for value in values)])
    return rows


def title(results: GridResults, engines: int, load: float) -> str:
    """What a table of figures is of."""
    rate = load * results.capacities[engines]
    return f"{results.trace.name}: {engines} engines, load {load:g} ({rate:.2f} requests/s)"


def terminal_tables(results: GridResults) -> list[Table]:
    """A table for each fleet and load, and one of ratios."""
    tables = []
    for name, figures, admission, joined in _cells(results):
        tables.append(_table(name, FIGURES_HEAD, figures))
        tables.append(_table("KV cache, batches and lines", ADMISSION_HEAD, admission))
        if joined:
            tables.append(_table("The minutes before and after engines joined", JOIN_HEAD, joined))
    rows = ratio_rows(results)
    if rows:
        tables.append(
            _table(f"Against {results.baseline}: geometric mean of ratios (below 1 is better)", RATIOS_HEAD, rows)
        )
    return tables


def _table(name: str, head: tuple[str, ...], rows: list[list[str]]) -> Table:
    return plain_table(name, head, rows, no_wrap=True)


_HUES = (215, 22, 172, 280, 45, 330, 95, 0, 195, 255, 140, 60, 310, 120)
_STYLES = "".join(f".p{place} {{ color: hsl({hue} 62% 45%); }}\n" for place, hue in enumerate(_HUES))


def page(results: GridResults) -> str:
    rates = ", ".join(f"{rate:.2f}/s with {engines} engines" for engines, rate in results.capacities.items())
    return render(
        "replay.html",
        f"Replay of {results.trace.name}",
        subtitle=f"{len(results.trace.rows):,} recorded requests · capacity {rates}",
        charts=[chart for engines in results.fleets for chart in _charts(results, engines)],
        style=_STYLES,
        baseline=results.baseline,
        against_head=RATIOS_HEAD,
        against=ratio_rows(results),
        figures_head=FIGURES_HEAD,
        admission_head=ADMISSION_HEAD,
        join_head=JOIN_HEAD,
        cells=_cells(results),
        command=results.command,
    )


def _cells(results: GridResults) -> list[tuple[str, list[list[str]], list[list[str]], list[list[str]]]]:
    """For each fleet and load, what it is, and its rows of all tables."""
    return [
        (
            title(results, engines, load),
            rows,
            admission_rows(results, engines, load),
            join_rows(results, engines, load),
        )
        for engines in results.fleets
        for load in results.loads
        if (rows := figure_rows(results, engines, load))
    ]


def _charts(results: GridResults, engines: int) -> list[Chart]:
    shares = max(
        (
            value
            for policy in results.policies
            for load in results.loads
            if (value := results.mean(engines, load, policy, lambda f: f.violations)) is not None
        ),
        default=1.0,
    )
    missed = linear(0, 100 * nice_top(shares), start_px=Y_START, end_px=Y_END, wanted=4, unit=" %")
    return [
        _milliseconds(results, engines, "mean TTFT", lambda f: f.ttft.mean * 1e3),
        _milliseconds(results, engines, "mean E2E", lambda f: f.e2e.mean * 1e3),
        _chart(results, engines, "SLO missed", figure=lambda f: f.violations * 100, y=missed),
        _from_zero(results, engines, "preemptions", lambda f: float(f.preemptions)),
        _from_zero(results, engines, "requests per second within the bounds", lambda f: f.goodput_per_second),
    ]


def _milliseconds(results: GridResults, engines: int, name: str, figure: Callable[[PolicyFigures], float]) -> Chart:
    values = [
        value
        for policy in results.policies
        for load in results.loads
        if (value := results.mean(engines, load, policy, figure)) is not None
    ]
    return _chart(results, engines, name, figure=figure, y=logarithmic(min(values), max(values), Y_START, Y_END))


def _from_zero(results: GridResults, engines: int, name: str, figure: Callable[[PolicyFigures], float]) -> Chart:
    values = [results.mean(engines, load, policy, figure) for policy in results.policies for load in results.loads]
    top = nice_top(max((value for value in values if value is not None), default=1.0))
    return _chart(results, engines, name, figure=figure, y=linear(0, top, start_px=Y_START, end_px=Y_END, wanted=4))


def _chart(results: GridResults, engines: int, name: str, figure: Callable[[PolicyFigures], float], y: Axis) -> Chart:
    loads = results.loads
    margin = 0.02 + 0.04 * (loads[-1] - loads[0])
    x = linear(
        100 * (loads[0] - margin), 100 * (loads[-1] + margin), start_px=X_START, end_px=X_END, wanted=6, unit=" %"
    )
    series = []
    for place, policy in enumerate(results.policies):
        points: list[Point] = [(100 * load, results.mean(engines, load, policy, figure)) for load in loads]
        series.append(ChartSeries(policy, f"p{place % len(_HUES)}", points))
    return Chart(
        title=f"{name}, {engines} engines",
        note="over load, as a share of capacity",
        x=x,
        y=y,
        series=series,
        x_shown=[f"load {load:.0%}" for load in loads],
        x_title="load, as a share of capacity",
        y_title="requests/s" if "per second" in name else name,
    )


FEWEST_LIMITS = 3  # below this there is no curve
Figure = Callable[[PolicyFigures], float]


def knee(results: GridResults, policy: str = "ours") -> str:
    """The picture for the first fleet and the highest load; empty with fewer than three static limits."""
    limits, level = _arms(results, policy)
    if len(limits) < FEWEST_LIMITS:
        return ""
    engines, load = results.fleets[0], results.loads[-1]

    def value(name: str, figure: Figure) -> float:
        return results.mean(engines, load, name, figure) or 0.0

    def series(figure: Figure) -> list[ChartSeries]:
        curve: list[Point] = [(float(limit), value(name, figure)) for limit, name in limits]
        ends = (curve[0][0], curve[-1][0])
        lines = [
            ChartSeries(arm, style(1 + number), [(end, value(name, figure)) for end in ends])
            for number, (arm, name) in enumerate(level)
        ]
        return [ChartSeries("static limit", style(0), curve), *lines]

    x = _limits_axis([limit for limit, _ in limits])
    panels = [
        ("tokens per second", lambda f: f.output_tokens_per_second, _axis_from_zero),
        ("TTFT p99", lambda f: f.ttft.p99 * 1e3, _axis_of_milliseconds),
        ("preemptions", lambda f: float(f.preemptions), _axis_from_zero),
    ]
    charts = []
    for title, figure, axis in panels:
        drawn = series(figure)
        charts.append(
            Chart(
                title,
                note="over the limit",
                x=x,
                y=axis([y for each in drawn for _, y in each.points if y is not None]),
                series=drawn,
            )
        )
    names = ["static limit", *(arm for arm, _ in level)]
    return sheet(charts, [(style(number), name) for number, name in enumerate(names)])


def _arms(results: GridResults, policy: str) -> tuple[list[tuple[int, str]], list[tuple[str, str]]]:
    """Static limits and what they are called, and the other arms."""
    limits, level = [], []
    for name in results.policies:
        base, arm = parted(name)
        if base == policy and arm is not None:
            if arm.name.startswith("static:") and arm.limit is not None:
                limits.append((arm.limit, name))
            else:
                level.append((arm.name, name))
    return sorted(limits), level


def _limits_axis(limits: list[int]) -> Axis:
    powers = range(math.ceil(math.log2(limits[0])), math.floor(math.log2(limits[-1])) + 1)
    return doubling([2**power for power in powers], limits[0], limits[-1], start_px=X_START, end_px=X_END)


def _axis_from_zero(values: list[float]) -> Axis:
    return linear(0.0, nice_top(max(values)), start_px=Y_START, end_px=Y_END, wanted=4)


def _axis_of_milliseconds(values: list[float]) -> Axis:
    return logarithmic(min(values), max(values), Y_START, Y_END)
