"""A grid's results as one HTML page that needs no network: policies over load, and all tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from loadtest.replay.results import GridResults
from loadtest.replay.summary import Figures
from loadtest.replay.tables import (
    ADMISSION_HEAD,
    FIGURES_HEAD,
    RATIOS_HEAD,
    admission_rows,
    figure_rows,
    ratio_rows,
    title,
)
from loadtest.report.axes import Axis, linear, logarithmic, nice_top
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.figure import milliseconds, number, percent

_HUES = (215, 22, 172, 280, 45, 330, 95, 0, 195, 255, 140, 60, 310, 120)
_STYLES = "".join(
    f".p{place} {{ color: hsl({hue} 62% 45%); }} .p{place}.line {{ stroke-width: {3 if place == 0 else 1.6}; }}\n"
    for place, hue in enumerate(_HUES)
)


def page(results: GridResults) -> str:
    """The whole page."""
    assets = files("loadtest.report") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    heading = f"Replay of {results.trace.name}"
    rates = ", ".join(f"{rate:.2f}/s with {engines} engines" for engines, rate in results.capacities.items())
    charts = "".join(chart.svg() for engines in results.fleets for chart in _charts(results, engines))
    figures = "".join(
        f"<h2>{escape(title(results, engines, load))}</h2>{_table(FIGURES_HEAD, rows)}"
        f"{_table(ADMISSION_HEAD, admission_rows(results, engines, load))}"
        for engines in results.fleets
        for load in results.loads
        if (rows := figure_rows(results, engines, load))
    )
    against = ratio_rows(results)
    compared = (
        f"<h2>Against {escape(results.baseline)}, geometric means</h2>{_table(RATIOS_HEAD, against)}" if against else ""
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{style}{_STYLES}</style></head><body>"
        f"<header><h1>{escape(heading)}</h1><p>{len(results.trace.rows):,} recorded requests · capacity {escape(rates)}"
        f"</p></header>{compared}<h2>Policies by load</h2>"
        f'<div class="charts">{charts}</div>{figures}'
        f"<h2>How it was made</h2><code>{escape(results.command)}</code>"
        f"<script>{script}</script></body></html>\n"
    )


def _charts(results: GridResults, engines: int) -> list[Chart]:
    shares = max(
        (value for policy in results.policies for load in results.loads
         if (value := results.mean(engines, load, policy, lambda f: f.violations)) is not None),
        default=1.0,
    )  # fmt: skip
    missed = linear(0, 100 * nice_top(shares), Y_START, Y_END, 4, " %")
    return [
        _milliseconds(results, engines, "mean TTFT", lambda f: f.ttft.mean * 1e3),
        _milliseconds(results, engines, "mean E2E", lambda f: f.e2e.mean * 1e3),
        _chart(results, engines, "SLO missed", lambda f: f.violations * 100, missed, _percent),
        _from_zero(results, engines, "preemptions", lambda f: float(f.preemptions)),
        _from_zero(results, engines, "requests per second within the bounds", lambda f: f.goodput_per_second),
    ]


def _percent(value: float | None) -> str:
    return percent(None if value is None else value / 100)


def _milliseconds(results: GridResults, engines: int, name: str, figure: Callable[[Figures], float]) -> Chart:
    values = [
        value
        for policy in results.policies
        for load in results.loads
        if (value := results.mean(engines, load, policy, figure)) is not None
    ]
    return _chart(results, engines, name, figure, logarithmic(min(values), max(values), Y_START, Y_END), milliseconds)


def _from_zero(results: GridResults, engines: int, name: str, figure: Callable[[Figures], float]) -> Chart:
    values = [results.mean(engines, load, policy, figure) for policy in results.policies for load in results.loads]
    top = nice_top(max((value for value in values if value is not None), default=1.0))
    return _chart(results, engines, name, figure, linear(0, top, Y_START, Y_END, 4), number)


def _chart(
    results: GridResults,
    engines: int,
    name: str,
    figure: Callable[[Figures], float],
    y: Axis,
    write: Callable[[float | None], str],
) -> Chart:
    loads = results.loads
    margin = 0.02 + 0.04 * (loads[-1] - loads[0])
    x = linear(100 * (loads[0] - margin), 100 * (loads[-1] + margin), X_START, X_END, 6, " %")
    series = []
    for place, policy in enumerate(results.policies):
        points: list[Point] = [(100 * load, results.mean(engines, load, policy, figure)) for load in loads]
        shown = [write(value) for _, value in points]
        series.append(Series(policy, f"p{place % len(_HUES)}", points, shown))
    return Chart(
        title=f"{name}, {engines} engines",
        note="over load, as a share of capacity",
        x=x,
        y=y,
        series=series,
        x_shown=[f"load {load:.0%}" for load in loads],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="card"><table><tr>{top}</tr>{body}</table></div>'
