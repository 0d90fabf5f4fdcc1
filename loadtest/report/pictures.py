"""The charts of the report: latency, requests in flight and tokens over time, and the latency percentiles."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.drive.record import DROPPED, INTERRUPTED, Record
from loadtest.report.axes import Axis, linear, logarithmic, nice_top, percentiles
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.concurrency import highest_within, sweep
from loadtest.report.figure import milliseconds, number
from loadtest.report.samples import sample_charts
from loadtest.report.schema import Bucket, Results
from loadtest.report.statistics import percentile

_MOST_DOTS = 1500
_COLUMNS = 280
_CURVE_PERCENTS = [
    *range(100),
    *(99 + step / 10 for step in range(10)),
    *(99.9 + step / 100 for step in range(10)),
    100,
]


def pictures(results: Results, records: Sequence[Record]) -> list[str]:
    """Every chart there is data for, as SVG."""
    charts = [_over_time(results, records, "TTFT"), _over_time(results, records, "E2E")]
    charts += [_in_flight(results, records), _curve(records), _tokens(results), _endings(results)]
    if results.samples is not None:
        charts += sample_charts(results.samples, _time(results))
    return [chart.svg() for chart in charts if chart is not None]


def _over_time(results: Results, records: Sequence[Record], kind: str) -> Chart | None:
    dots = [(record.due, latency) for record in records if (latency := _latency_ms(record, kind)) is not None]
    if not dots:
        return None
    key = kind.lower()
    buckets = [bucket for bucket in results.timeline if bucket.e2e_p50 is not None]
    width = _width(results.timeline)
    series = [
        _bucketed(buckets, width, f"{key}_p50", "p50", "s1"),
        _bucketed(buckets, width, f"{key}_p95", "p95", "s2"),
    ]
    values = [latency for _, latency in dots]
    return Chart(
        title=f"{kind} over time",
        note="from the intended send, at the moment the request was due",
        x=_time(results),
        y=logarithmic(min(values), max(values), Y_START, Y_END),
        series=series,
        x_shown=_moments(buckets, width),
        dots=_thinned(dots),
        marks=[record.due for record in records if not record.ok and record.outcome != INTERRUPTED][:_MOST_DOTS],
    )


def _bucketed(buckets: Sequence[Bucket], width: float, key: str, name: str, style: str) -> Series:
    points: list[Point] = [(bucket.start + width / 2, getattr(bucket, key)) for bucket in buckets]
    return Series(name, style, points, [milliseconds(value) for _, value in points])


def _in_flight(results: Results, records: Sequence[Record]) -> Chart:
    levels = sweep((record.sent, record.end) for record in records if record.outcome != DROPPED)
    length = max(record.end for record in records)
    edges = [index * length / _COLUMNS for index in range(_COLUMNS + 1)]
    highest = highest_within(levels, edges)
    points: list[Point] = [(edges[index], float(level)) for index, level in enumerate(highest)]
    wanted = results.plan["concurrency"]
    return Chart(
        title="Requests in flight",
        note=f"peak {results.concurrency.peak}, mean {number(results.concurrency.mean)}",
        x=_time(results),
        y=linear(0, nice_top(max(results.concurrency.peak, wanted or 0)), Y_START, Y_END, 4),
        series=[Series("in flight", "s1", points, [number(level) for level in highest], steps=True, area=True)],
        x_shown=[f"{edge:.1f} s" for edge in edges[:-1]],
    )


def _tokens(results: Results) -> Chart | None:
    rates = [bucket.output_tokens_per_second for bucket in results.timeline]
    if not any(rates):
        return None
    series = [_rate(results.timeline, rates, "tokens/s", "s3", area=True)]
    return _rates(results, "Output tokens per second", "each request's tokens spread evenly over its decode", series)


def _endings(results: Results) -> Chart:
    buckets, width = results.timeline, _width(results.timeline)
    series = [_rate(buckets, [b.succeeded / width for b in buckets], "succeeded/s", "s1", area=True)]
    if any(bucket.failed for bucket in buckets):
        series.append(_rate(buckets, [b.failed / width for b in buckets], "failed/s", "bad", area=False))
    return _rates(results, "Requests ended per second", "", series)


def _rates(results: Results, title: str, note: str, series: list[Series]) -> Chart:
    top = max(value for one in series for _, value in one.points if value is not None)
    return Chart(
        title=title,
        note=note,
        x=_time(results),
        y=linear(0, nice_top(top), Y_START, Y_END, 4),
        series=series,
        x_shown=_moments(results.timeline, _width(results.timeline)),
    )


def _rate(buckets: Sequence[Bucket], values: Sequence[float], name: str, style: str, *, area: bool) -> Series:
    middle = _width(buckets) / 2
    points: list[Point] = [(bucket.start + middle, value) for bucket, value in zip(buckets, values, strict=True)]
    return Series(name, style, points, [number(value) for value in values], area=area)


def _curve(records: Sequence[Record]) -> Chart | None:
    good = [record for record in records if record.ok]
    streamed = [(record, record.first_token) for record in good if record.first_token is not None]
    named = [
        ("TTFT", "s1", [(first - record.due) * 1e3 for record, first in streamed]),
        ("TTFT from actual send", "s1 dashed", [(first - record.sent) * 1e3 for record, first in streamed]),
        ("E2E", "s2", [(record.end - record.due) * 1e3 for record in good]),
        ("E2E from actual send", "s2 dashed", [(record.end - record.sent) * 1e3 for record in good]),
    ]
    filled = [(name, style, sorted(values)) for name, style, values in named if values]
    if not filled:
        return None
    count = len(good)
    percents = [percent for percent in _CURVE_PERCENTS if percent == 100 or (100 - percent) / 100 * count >= 1]
    everything = [value for _, _, values in filled for value in (values[0], values[-1])]
    return Chart(
        title="Latency percentiles",
        note="from the intended send unless told otherwise",
        x=percentiles(count, X_START, X_END),
        y=logarithmic(min(everything), max(everything), Y_START, Y_END),
        series=[_percentile_series(name, style, values, percents) for name, style, values in filled],
        x_shown=["max" if percent == 100 else f"p{percent:g}" for percent in percents],
    )


def _percentile_series(name: str, style: str, ordered: list[float], percents: Sequence[float]) -> Series:
    values = [percentile(ordered, percent) for percent in percents]
    points: list[Point] = list(zip(percents, values, strict=True))
    return Series(name, style, points, [milliseconds(value) for value in values])


def _latency_ms(record: Record, kind: str) -> float | None:
    if not record.ok:
        return None
    end = record.end if kind == "E2E" else record.first_token
    return None if end is None else (end - record.due) * 1e3


def _time(results: Results) -> Axis:
    width = _width(results.timeline)
    return linear(0, max(results.overall.end, results.timeline[-1].start + width / 2), X_START, X_END, 8, " s")


def _moments(buckets: Sequence[Bucket], width: float) -> list[str]:
    return [f"{bucket.start:g} to {round(bucket.start + width, 3):g} s" for bucket in buckets]


def _width(buckets: Sequence[Bucket]) -> float:
    return buckets[1].start - buckets[0].start if len(buckets) > 1 else 1.0


def _thinned(dots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every n-th request, and always the slowest ones: outliers are what the eye looks for."""
    if len(dots) <= _MOST_DOTS:
        return dots
    step = -(-len(dots) // _MOST_DOTS)
    slowest = sorted(dots, key=lambda dot: dot[1])[-_MOST_DOTS // 10 :]
    return [*dots[::step], *slowest]
