"""Two runs, or two series, beside each other as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loadtest.drive.record import Record
from loadtest.report.chart import (
    X_END,
    X_START,
    Y_END,
    Y_START,
    Chart,
    ChartSeries,
    Point,
    linear,
    logarithmic,
    nice_top,
)
from loadtest.report.diff import FIGURES_HEAD, MADE_HEAD, Diff, Pair, colour, figure_rows
from loadtest.report.document import render
from loadtest.report.files import Saved
from loadtest.report.run_charts import curves
from loadtest.report.schema import Bucket, Results
from loadtest.report.series_charts import series_charts
from loadtest.report.single_requests import e2e_seconds, ttft_seconds

_OVER_TIME = (("ttft_p50", "TTFT p50"), ("ttft_p95", "TTFT p95"), ("tpot_p50", "TPOT p50"), ("e2e_p95", "E2E p95"))


@dataclass(frozen=True, slots=True)
class RunSide:
    """A run among others on a page: its name, and its style in charts."""

    name: str
    style: str
    run: Results
    records: Sequence[Record]


def diff_page(before: Saved, after: Saved, found: Diff, broken: Sequence[str]) -> str:
    """The whole page. `broken`: what rules were broken."""
    return render(
        "diff.html",
        f"{before.name} → {after.name}",
        f"{before.series.environment.started_at} · {after.series.environment.started_at}",
        _charts(before, after),
        before=before,
        after=after,
        broken=broken,
        found=found,
        made_head=MADE_HEAD,
        figures_head=FIGURES_HEAD,
        figures=[_figures(pair) for pair in found.pairs],
    )


def _figures(pair: Pair) -> tuple[str, list[list[str]], list[str | None]]:
    """The title, the rows, and the colour of each row's change."""
    rows = list(figure_rows(pair))
    title = f"Figures: {pair.label}" if pair.label else "Figures"
    return title, [cells for _, cells in rows], [colour(change) for change, _ in rows]


def _charts(before: Saved, after: Saved) -> list[Chart]:
    if before.run is not None and after.run is not None:
        sides = [RunSide("before", "s1", before.run, before.records), RunSide("after", "s2", after.run, after.records)]
        return [*over_time(sides), *distributions(sides)]
    points = [
        point.model_copy(update={"target": f"{when}: {point.target}" if point.target else when})
        for when, saved in (("before", before), ("after", after))
        for point in saved.series.points
    ]
    return series_charts(before.series.model_copy(update={"points": points, "differences": []}))


def over_time(sides: Sequence[RunSide]) -> Iterator[Chart]:
    """Latencies and tokens of all runs over the same seconds."""
    x = linear(0, max(1e-3, *(side.run.overall.end for side in sides)), X_START, X_END, 8, " s")
    for name, title in _OVER_TIME:
        lines = [line for side in sides if (line := _line(side, name)) is not None]
        values = [value for line in lines for _, value in line.points if value is not None]
        if values:
            y = logarithmic(min(values), max(values), Y_START, Y_END)
            yield Chart(f"{title} over time", "", x, y, lines, y_title=title)
    lines = [line for side in sides if (line := _line(side, "output_tokens_per_second")) is not None]
    top = max((value for line in lines for _, value in line.points if value is not None), default=0.0)
    if top:
        y = linear(0, nice_top(top), Y_START, Y_END, 4)
        yield Chart("Output tokens per second", "", x, y, lines, y_title="tokens/s")


def _line(side: RunSide, name: str) -> ChartSeries | None:
    buckets = side.run.timeline
    return ChartSeries(side.name, side.style, _points(buckets, name)) if buckets else None


def _points(buckets: Sequence[Bucket], name: str) -> list[Point]:
    width = buckets[1].start - buckets[0].start if len(buckets) > 1 else 1.0
    return [(bucket.start + width / 2, getattr(bucket, name)) for bucket in buckets]


def distributions(sides: Sequence[RunSide]) -> Iterator[Chart]:
    """TTFT and E2E of the runs whose requests are known."""
    for kind, latency in (("TTFT", ttft_seconds), ("E2E", e2e_seconds)):
        found = [(side, [value * 1e3 for one in side.records if (value := latency(one)) is not None]) for side in sides]
        chart = curves([(side.name, side.style, its) for side, its in found if its], "from the intended send")
        if chart is not None:
            yield replace(chart, title=f"Distribution of {kind}", y_title=kind)
