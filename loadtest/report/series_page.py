"""The report of a series as one HTML page that needs no network, with a link to each run's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from loadtest.report.axes import Axis, linear, logarithmic, nice_top
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.document import document, table
from loadtest.report.figure import milliseconds, number
from loadtest.report.load import asked_told
from loadtest.report.series import Point as Measured
from loadtest.report.series import Series as Runs
from loadtest.report.series_tables import tables

_STYLES = ("s1", "s2", "s3", "s1 dashed", "s2 dashed", "s3 dashed")


def series_page(series: Runs) -> str:
    """The whole page."""
    heading = f"Load tests of {series.plan['model']}"
    charts = "".join(chart.svg() for chart in _charts(series))
    tabled = "".join(f"<h2>{escape(title)}</h2>{table(head, rows)}" for title, head, rows in tables(series))
    links = "".join(
        f'<li><a href="{escape(folder)}/report.html">{escape(folder)}</a></li>' for folder in series.folders
    )
    return document(
        heading,
        f"{asked_told(series.plan)} · {series.environment.started_at}",
        f"{_verdict(series)}"
        + (f'<h2>By load</h2><div class="charts">{charts}</div>' if charts else "")
        + f"{tabled}<h2>Runs, in order</h2><ul>{links}</ul>"
        f"<h2>Command</h2><code>{escape(shlex.join(series.environment.command))}</code>",
    )


def _verdict(series: Runs) -> str:
    items = "".join(f"<li>{escape(reason)}</li>" for reason in series.reasons)
    head = "Passed." if series.passed else "Failed."
    listed = f"<ul>{items}</ul>" if items else ""
    return f'<div class="verdict{" passed" if series.passed else ""}"><b>{head}</b>{listed}</div>'


def _charts(series: Runs) -> list[Chart]:
    """Pictures over the load, where there are several."""
    if len({point.load for point in series.points}) < 2:
        return []
    open_loop = series.plan["rate_per_second"] is not None
    rate = (
        "goodput_per_second" if any("goodput_per_second" in p.figures for p in series.points) else "requests_per_second"
    )
    latency = "ttft_p95" if any("ttft_p95" in point.figures for point in series.points) else "e2e_p95"
    offered = "requests/s offered" if open_loop else "users"
    charts = [_over_load(series.points, rate, f"{'Goodput' if rate.startswith('good') else 'Requests/s'} by {offered}")]
    charts.append(_over_load(series.points, latency, f"{latency[:-4].upper()} p95 by {offered}"))
    return [chart for chart in charts if chart.series]


def _over_load(points: Sequence[Measured], name: str, title: str) -> Chart:
    known = {(point.target, point.offered): point.figures[name].median for point in points if name in point.figures}
    loads = sorted({offered for _, offered in known})
    shown = milliseconds if name.endswith("p95") else number
    drawn = []
    for place, target in enumerate(dict.fromkeys(target for target, _ in known)):
        line: list[Point] = [(load, known.get((target, load))) for load in loads]
        told = [shown(value) for _, value in line]
        drawn.append(Series(target or "measured", _STYLES[place % len(_STYLES)], line, told))
    return Chart(
        title=title,
        note="median of the valid runs",
        x=linear(0, nice_top(max(loads, default=1.0)), X_START, X_END, 8),
        y=_vertical(list(known.values()), logarithmic_ms=name.endswith("p95")),
        series=drawn,
        x_shown=[f"{load:g}" for load in loads],
    )


def _vertical(values: Sequence[float], *, logarithmic_ms: bool) -> Axis:
    if logarithmic_ms:
        return logarithmic(min(values, default=1.0), max(values, default=1.0), Y_START, Y_END)
    return linear(0, nice_top(max(values, default=1.0)), Y_START, Y_END, 4)
