"""A grid's results as one HTML page that needs no network: policies over load, and all tables."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

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
from loadtest.report.document import document, table
from loadtest.report.plots import Plots

_HUES = (215, 22, 172, 280, 45, 330, 95, 0, 195, 255, 140, 60, 310, 120)
_STYLES = "".join(f".p{place} {{ color: hsl({hue} 62% 45%); }}\n" for place, hue in enumerate(_HUES))


def page(results: GridResults) -> str:
    plots = Plots()
    heading = f"Replay of {results.trace.name}"
    rates = ", ".join(f"{rate:.2f}/s with {engines} engines" for engines, rate in results.capacities.items())
    charts = plots.figures([chart for engines in results.fleets for chart in _charts(results, engines)])
    figures = "".join(
        f"<h2>{escape(title(results, engines, load))}</h2>{table(FIGURES_HEAD, rows)}"
        f"{table(ADMISSION_HEAD, admission_rows(results, engines, load))}"
        for engines in results.fleets
        for load in results.loads
        if (rows := figure_rows(results, engines, load))
    )
    against = ratio_rows(results)
    compared = (
        f"<h2>Against {escape(results.baseline)}, geometric means</h2>{table(RATIOS_HEAD, against)}" if against else ""
    )
    return document(
        heading,
        f"{len(results.trace.rows):,} recorded requests · capacity {rates}",
        f"{compared}<h2>Policies by load</h2>{charts}{figures}"
        f"<h2>How it was made</h2><code>{escape(results.command)}</code>",
        plots,
        _STYLES,
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
        _chart(results, engines, "SLO missed", lambda f: f.violations * 100, missed),
        _from_zero(results, engines, "preemptions", lambda f: float(f.preemptions)),
        _from_zero(results, engines, "requests per second within the bounds", lambda f: f.goodput_per_second),
    ]


def _milliseconds(results: GridResults, engines: int, name: str, figure: Callable[[Figures], float]) -> Chart:
    values = [
        value
        for policy in results.policies
        for load in results.loads
        if (value := results.mean(engines, load, policy, figure)) is not None
    ]
    return _chart(results, engines, name, figure, logarithmic(min(values), max(values), Y_START, Y_END))


def _from_zero(results: GridResults, engines: int, name: str, figure: Callable[[Figures], float]) -> Chart:
    values = [results.mean(engines, load, policy, figure) for policy in results.policies for load in results.loads]
    top = nice_top(max((value for value in values if value is not None), default=1.0))
    return _chart(results, engines, name, figure, linear(0, top, Y_START, Y_END, 4))


def _chart(
    results: GridResults,
    engines: int,
    name: str,
    figure: Callable[[Figures], float],
    y: Axis,
) -> Chart:
    loads = results.loads
    margin = 0.02 + 0.04 * (loads[-1] - loads[0])
    x = linear(100 * (loads[0] - margin), 100 * (loads[-1] + margin), X_START, X_END, 6, " %")
    series = []
    for place, policy in enumerate(results.policies):
        points: list[Point] = [(100 * load, results.mean(engines, load, policy, figure)) for load in loads]
        series.append(Series(policy, f"p{place % len(_HUES)}", points))
    return Chart(
        title=f"{name}, {engines} engines",
        note="over load, as a share of capacity",
        x=x,
        y=y,
        series=series,
        x_shown=[f"load {load:.0%}" for load in loads],
    )
