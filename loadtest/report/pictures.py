"""The charts of a run's page, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.drive.record import Record
from loadtest.report.axes import logarithmic, percentiles
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.in_flight import in_flight, on_backends
from loadtest.report.over_time import endings_over_time, latency_over_time, time_axis, tokens_over_time
from loadtest.report.samples import sample_charts
from loadtest.report.schema import Results
from loadtest.report.statistics import percentile

_CURVE_PERCENTS = [
    *range(100),
    *(99 + step / 10 for step in range(10)),
    *(99.9 + step / 100 for step in range(10)),
    100,
]


def pictures(results: Results, records: Sequence[Record]) -> list[Chart]:
    """Every chart there is data for; some need the records."""
    charts = [latency_over_time(results, records, kind) for kind in ("TTFT", "TPOT", "E2E")]
    charts += [tokens_over_time(results), endings_over_time(results), latency_curve(records)]
    if records:
        charts += [in_flight(results, records), *on_backends(results, records)]
    if results.samples is not None:
        charts += sample_charts(results.samples, time_axis(results))
    return [chart for chart in charts if chart is not None]


def latency_curve(records: Sequence[Record]) -> Chart | None:
    """The whole distribution: which share of the requests was at least that fast, each nine as wide as the other."""
    good = [record for record in records if record.ok]
    streamed = [(record, record.first_token) for record in good if record.first_token is not None]
    named = [
        ("TTFT", "s1", [(first - record.due) * 1e3 for record, first in streamed]),
        ("TTFT from actual send", "s1 dashed", [(first - record.sent) * 1e3 for record, first in streamed]),
        ("E2E", "s2", [(record.end - record.due) * 1e3 for record in good]),
        ("E2E from actual send", "s2 dashed", [(record.end - record.sent) * 1e3 for record in good]),
    ]
    return curves([(name, style, values) for name, style, values in named if values], "from the intended send, or told")


def curves(named: Sequence[tuple[str, str, Sequence[float]]], note: str) -> Chart | None:
    """Distributions of milliseconds by name and style."""
    if not named:
        return None
    filled = [(name, style, sorted(values)) for name, style, values in named]
    count = max(len(values) for _, _, values in filled)
    percents = [percent for percent in _CURVE_PERCENTS if percent == 100 or (100 - percent) / 100 * count >= 1]
    everything = [value for _, _, values in filled for value in (values[0], values[-1])]
    return Chart(
        title="Distribution of latency",
        note=note,
        x=percentiles(count, X_START, X_END),
        y=logarithmic(min(everything), max(everything), Y_START, Y_END),
        series=[_percentile_series(name, style, values, percents) for name, style, values in filled],
        x_shown=["max" if percent == 100 else f"p{percent:g}" for percent in percents],
    )


def _percentile_series(name: str, style: str, ordered: list[float], percents: Sequence[float]) -> Series:
    points: list[Point] = [(percent, percentile(ordered, percent)) for percent in percents]
    return Series(name, style, points)
