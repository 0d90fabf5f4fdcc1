"""Two runs, or two series, beside each other as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

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

_OVER_TIME = (("ttft_p50", "TTFT p50"), ("ttft_p95", "TTFT p95"), ("tpot_p50", "TPOT p50"), ("e2e_p95", "E2E p95"))
_BEFORE, _AFTER = "s1", "s2"


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
        return [*_over_time(before.run, after.run), *_distributions(before.records, after.records)]
    points = [
        point.model_copy(update={"target": f"{when}: {point.target}" if point.target else when})
        for when, saved in (("before", before), ("after", after))
        for point in saved.series.points
    ]
    return series_charts(before.series.model_copy(update={"points": points, "differences": []}))


def _over_time(before: Results, after: Results) -> Iterator[Chart]:
    for name, title in _OVER_TIME:
        lines = _lines(before, after, name)
        values = [value for line in lines for _, value in line.points if value is not None]
        if values:
            y = logarithmic(min(values), max(values), Y_START, Y_END)
            yield Chart(f"{title} over time", "", linear(0, _end(before, after), X_START, X_END, 8, " s"), y, lines)
    lines = _lines(before, after, "output_tokens_per_second")
    top = max((value for line in lines for _, value in line.points if value is not None), default=0.0)
    if top:
        y = linear(0, nice_top(top), Y_START, Y_END, 4)
        x = linear(0, _end(before, after), X_START, X_END, 8, " s")
        yield Chart("Output tokens per second", "", x, y, lines)


def _lines(before: Results, after: Results, name: str) -> list[ChartSeries]:
    sides = (("before", _BEFORE, before.timeline), ("after", _AFTER, after.timeline))
    return [ChartSeries(label, style, _points(buckets, name)) for label, style, buckets in sides if buckets]


def _points(buckets: Sequence[Bucket], name: str) -> list[Point]:
    width = buckets[1].start - buckets[0].start if len(buckets) > 1 else 1.0
    return [(bucket.start + width / 2, getattr(bucket, name)) for bucket in buckets]


def _end(before: Results, after: Results) -> float:
    return max(before.overall.end, after.overall.end, 1e-3)


def _distributions(before: Sequence[Record], after: Sequence[Record]) -> Iterator[Chart]:
    for kind in ("TTFT", "E2E"):
        sides = (("before", _BEFORE, _latencies(before, kind)), ("after", _AFTER, _latencies(after, kind)))
        chart = curves([side for side in sides if side[2]], "from the intended send")
        if chart is not None:
            yield replace(chart, title=f"Distribution of {kind}")


def _latencies(records: Sequence[Record], kind: str) -> list[float]:
    ends = [(record, record.first_token if kind == "TTFT" else record.end) for record in records if record.ok]
    return [(end - record.due) * 1e3 for record, end in ends if end is not None]
