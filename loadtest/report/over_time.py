"""Charts over the time of a run: latency percentiles, tokens, and how requests ended."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.drive.record import INTERRUPTED, Record
from loadtest.report.axes import Axis, linear, logarithmic, nice_top
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.schema import Bucket, Results

_MOST_DOTS = 1000
_PERCENTILES = (("p50", "s1"), ("p95", "s2"), ("p99", "s6"))


def time_axis(results: Results) -> Axis:
    """The run from its start to its end."""
    end = results.timeline[-1].start + _width(results.timeline) / 2 if results.timeline else 0.0
    return linear(0, max(results.overall.end, end), X_START, X_END, 8, " s")


def latency_over_time(results: Results, records: Sequence[Record], kind: str) -> Chart | None:
    """`kind`: TTFT, E2E or TPOT. With the requests themselves as dots, where they are known."""
    key = kind.lower()
    buckets, half = results.timeline, _width(results.timeline) / 2
    series = [
        Series(name, style, [(bucket.start + half, getattr(bucket, f"{key}_{name}")) for bucket in buckets])
        for name, style in _PERCENTILES
        if any(getattr(bucket, f"{key}_{name}") is not None for bucket in buckets)
    ]
    if not series:
        return None
    dots = [(record.due, latency) for record in records if (latency := _latency_ms(record, kind))]
    failed = [record.due for record in records if not record.ok and record.outcome != INTERRUPTED]
    values = [value for one in series for _, value in one.points if value is not None] + [value for _, value in dots]
    told = "a request's mean time between tokens" if kind == "TPOT" else "from the intended send"
    return Chart(
        title=f"{kind} over time",
        note=f"{told}, at the moment it was due"
        + ("; dots are requests" if dots else "")
        + ("; ticks at the foot are failed ones" if failed else ""),
        x=time_axis(results),
        y=logarithmic(min(values), max(values), Y_START, Y_END),
        series=series,
        dots=_thinned(dots),
        marks=_evenly(failed),
    )


def tokens_over_time(results: Results) -> Chart | None:
    """Output tokens; None where there were none."""
    rates = [bucket.output_tokens_per_second for bucket in results.timeline]
    if not any(rates):
        return None
    series = [_rate(results.timeline, rates, "tokens/s", "s3", area=True)]
    return _rates(results, "Output tokens per second", "each request's tokens spread evenly over its decode", series)


def endings_over_time(results: Results) -> Chart | None:
    buckets, width = results.timeline, _width(results.timeline)
    if not buckets:
        return None
    series = [_rate(buckets, [b.succeeded / width for b in buckets], "succeeded/s", "s1", area=True)]
    if any(bucket.failed for bucket in buckets):
        series.append(_rate(buckets, [b.failed / width for b in buckets], "failed/s", "bad", area=False))
    return _rates(results, "Requests ended per second", "", series)


def _rates(results: Results, title: str, note: str, series: list[Series]) -> Chart:
    top = max(value for one in series for _, value in one.points if value is not None)
    return Chart(title, note, time_axis(results), linear(0, nice_top(top), Y_START, Y_END, 4), series)


def _rate(buckets: Sequence[Bucket], values: Sequence[float], name: str, style: str, *, area: bool) -> Series:
    middle = _width(buckets) / 2
    points: list[Point] = [(bucket.start + middle, value) for bucket, value in zip(buckets, values, strict=True)]
    return Series(name, style, points, area=area)


def _latency_ms(record: Record, kind: str) -> float | None:
    if not record.ok:
        return None
    if kind == "TPOT":
        return None if (tpot := record.tpot_seconds) is None else tpot * 1e3
    end = record.end if kind == "E2E" else record.first_token
    return None if end is None else (end - record.due) * 1e3


def _width(buckets: Sequence[Bucket]) -> float:
    return buckets[1].start - buckets[0].start if len(buckets) > 1 else 1.0


def _thinned(dots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every n-th request, and always the slowest ones: outliers are what the eye looks for."""
    if len(dots) <= _MOST_DOTS:
        return dots
    step = -(-len(dots) // _MOST_DOTS)
    slowest = sorted(dots, key=lambda dot: dot[1])[-_MOST_DOTS // 10 :]
    return [*dots[::step], *slowest]


def _evenly(moments: list[float]) -> list[float]:
    """No more than can be told apart, from the whole run."""
    return moments[:: -(-len(moments) // _MOST_DOTS)] if moments else []
