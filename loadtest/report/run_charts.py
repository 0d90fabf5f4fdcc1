"""Charts of a run: latency, tokens and endings over time; requests in flight, in all and by backend."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from loadtest.drive.record import DROPPED, INTERRUPTED, Record
from loadtest.report.chart import (
    X_END,
    X_START,
    Y_END,
    Y_START,
    Axis,
    Chart,
    ChartSeries,
    Point,
    linear,
    logarithmic,
    nice_top,
    percentiles,
)
from loadtest.report.formatting import milliseconds, number
from loadtest.report.prompt_charts import latency_histogram, ttft_by_prompt
from loadtest.report.samples import sample_charts
from loadtest.report.schema import BackendGauges, Bucket, PageSeries, Results
from loadtest.report.single_requests import ShownRequests, e2e_seconds, tpot_seconds, ttft_seconds
from loadtest.report.statistics import percentile
from loadtest.report.timeline import Level, highest_within, longest_above, peak, sweep

_MOST_MARKS = 1000
_LATENCIES = {"TTFT": ttft_seconds, "TPOT": tpot_seconds, "E2E": e2e_seconds}
_PERCENTILES = (("p50", "s1"), ("p95", "s2"), ("p99", "s6"))


def time_axis(results: Results) -> Axis:
    """The run from its start to its end."""
    end = results.timeline[-1].start + _width(results.timeline) / 2 if results.timeline else 0.0
    return linear(0, max(results.overall.end, end), start_px=X_START, end_px=X_END, wanted=8, unit=" s")


def latency_over_time(results: Results, records: Sequence[Record], shown: ShownRequests, kind: str) -> Chart | None:
    """`kind`: TTFT, E2E or TPOT. With the requests themselves as dots, where they are known."""
    key = kind.lower()
    buckets, half = results.timeline, _width(results.timeline) / 2
    series = [
        ChartSeries(name, style, [(bucket.start + half, getattr(bucket, f"{key}_{name}")) for bucket in buckets])
        for name, style in _PERCENTILES
        if any(getattr(bucket, f"{key}_{name}") is not None for bucket in buckets)
    ]
    if not series:
        return None
    latency = _LATENCIES[kind]
    dots, rows = shown.dots(lambda one: None if (value := latency(one)) is None else (one.due, value * 1e3))
    failed = [record.due for record in records if not record.ok and record.outcome != INTERRUPTED]
    values = [value for one in series for _, value in one.points if value is not None] + [value for _, value in dots]
    bounds = _slo_bound(results, key)
    values += [bound for bound, _ in bounds]
    measured_from = "a request's mean time between tokens" if kind == "TPOT" else "from the intended send"
    return Chart(
        title=f"{kind} over time",
        note=f"{measured_from}, at the moment it was due"
        + ("; dots are requests, a click opens one" if dots else "")
        + ("; ticks at the foot are failed ones" if failed else ""),
        x=time_axis(results),
        y=logarithmic(min(values), max(values), Y_START, Y_END),
        series=series,
        dots=dots,
        dot_rows=rows,
        marks=_evenly(failed),
        y_title=kind,
        bounds=bounds,
    )


def _slo_bound(results: Results, key: str) -> list[tuple[float, str]]:
    """The limit of that latency in milliseconds, if the run had one."""
    bound = None if results.slo is None else getattr(results.slo, f"{key}_ms")
    return [] if bound is None else [(bound, f"SLO: {milliseconds(bound)}")]


def tokens_over_time(results: Results) -> Chart | None:
    """Output tokens; None where there were none."""
    rates = [bucket.output_tokens_per_second for bucket in results.timeline]
    if not any(rates):
        return None
    series = [_rate(results.timeline, rates, "tokens/s", "s3", area=True)]
    return _rates(
        results,
        "Output tokens per second",
        "each request's tokens spread evenly over its decode",
        series=series,
        unit="tokens/s",
    )


def endings_over_time(results: Results) -> Chart | None:
    buckets, width = results.timeline, _width(results.timeline)
    if not buckets:
        return None
    series = [_rate(buckets, [b.succeeded / width for b in buckets], "succeeded/s", "s1", area=True)]
    if any(bucket.failed for bucket in buckets):
        series.append(_rate(buckets, [b.failed / width for b in buckets], "failed/s", "bad", area=False))
    return _rates(results, "Requests ended per second", "", series=series, unit="requests/s")


def _rates(results: Results, title: str, note: str, series: list[ChartSeries], unit: str) -> Chart:
    top = max(value for one in series for _, value in one.points if value is not None)
    y = linear(0, nice_top(top), start_px=Y_START, end_px=Y_END, wanted=4)
    return Chart(title, note=note, x=time_axis(results), y=y, series=series, y_title=unit)


def _rate(buckets: Sequence[Bucket], values: Sequence[float], name: str, style: str, *, area: bool) -> ChartSeries:
    middle = _width(buckets) / 2
    points: list[Point] = [(bucket.start + middle, value) for bucket, value in zip(buckets, values, strict=True)]
    return ChartSeries(name, style, points, area=area)


def _width(buckets: Sequence[Bucket]) -> float:
    return buckets[1].start - buckets[0].start if len(buckets) > 1 else 1.0


def _evenly(moments: list[float]) -> list[float]:
    """A sample of the whole run, as dense as can be seen."""
    return moments[:: -(-len(moments) // _MOST_MARKS)] if moments else []


_COLUMNS = 280
_MOST_BACKENDS = 12


def in_flight(results: Results, records: Sequence[Record]) -> Chart:
    """All requests, between the client's send and the last byte of the answer."""
    points = _highest([(record.sent, record.end) for record in records if record.outcome != DROPPED], records)
    top = max(results.concurrency.peak, results.plan["concurrency"] or 0)
    return Chart(
        title="Requests in flight",
        note=f"peak {results.concurrency.peak}, mean {number(results.concurrency.mean)}",
        x=time_axis(results),
        y=linear(0, nice_top(top), start_px=Y_START, end_px=Y_END, wanted=4),
        series=[ChartSeries("in flight", "s1", points, steps=True, area=True)],
        y_title="requests",
    )


def on_backends(results: Results, records: Sequence[Record]) -> Iterator[Chart]:
    """Each of the busiest backends: by the client's records, by the gateway's own count, and what it may have."""
    by_backend: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        for name in (record.backend or "").split(","):
            if name and record.was_sent:
                by_backend[name].append(record)
    by_page = {name: (page.at, gauges) for page in _pages(results) for name, gauges in page.backends.items()}
    busiest = sorted(by_backend, key=lambda name: -len(by_backend[name]))[:_MOST_BACKENDS]
    for name in sorted(busiest):
        yield _on_backend(results, records, name, its=by_backend[name], by_page=by_page)


def _on_backend(
    results: Results,
    records: Sequence[Record],
    name: str,
    its: Sequence[Record],
    by_page: Mapping[str, tuple[Sequence[float], BackendGauges]],
) -> Chart:
    # The time in the gateway's line is not spent on a backend.
    spans = [(min(record.sent + (record.queue_seconds or 0.0), record.end), record.end) for record in its]
    points = _highest(spans, records)
    series = [ChartSeries("in flight, by the client", "s1", points, steps=True, area=True)]
    at, gauges = by_page.get(name, ((), BackendGauges()))
    moments = [x for x, _ in points]
    if any(value is not None for value in gauges.in_flight):
        series.append(ChartSeries("by the gateway", "s3", _held(moments, at, gauges.in_flight), steps=True))
    caps = [value for value in gauges.limit if value is not None]
    if caps:
        series.append(ChartSeries("cap", "bad dashed", _held(moments, at, gauges.limit), steps=True))
        cap = _against_cap(sweep(spans), min(caps), max(caps))
    else:
        cap = "cap not known: no page of the gateway's metrics was read (--metrics-url)"
    highest = max(value for one in series for _, value in one.points if value is not None)
    return Chart(
        title=f"In flight on {name}",
        note=f"peak {peak(sweep(spans))}, {cap}",
        x=time_axis(results),
        y=linear(0, nice_top(highest), start_px=Y_START, end_px=Y_END, wanted=4),
        series=series,
        y_title="requests",
    )


def _against_cap(levels: list[Level], lowest: float, highest: float) -> str:
    """The client sees an answer end after the gateway did, so for moments it counts one too many."""
    cap = f"cap {highest:g}" if lowest == highest else f"cap {lowest:g} to {highest:g}"
    above = longest_above(levels, highest)
    return f"{cap}; above it for {milliseconds(above * 1e3)} at most, as seen by the client" if above else cap


def _pages(results: Results) -> Iterator[PageSeries]:
    yield from results.samples.pages if results.samples is not None else []


def _highest(spans: Sequence[tuple[float, float]], records: Sequence[Record]) -> list[Point]:
    """The highest in each of as many columns as can be seen."""
    length = max(record.end for record in records)
    edges = [index * length / _COLUMNS for index in range(_COLUMNS + 1)]
    highest = highest_within(sweep(spans), edges)
    return [(edges[index], float(level)) for index, level in enumerate(highest)]


def _held(moments: Sequence[float], at: Sequence[float], values: Sequence[float | None]) -> list[Point]:
    """The last reported value at each moment; before the first report, that one."""
    return [(moment, values[max(0, bisect_right(at, moment) - 1)]) for moment in moments]


_CURVE_PERCENTS = [
    *range(100),
    *(99 + step / 10 for step in range(10)),
    *(99.9 + step / 100 for step in range(10)),
    100,
]


def pictures(results: Results, records: Sequence[Record], shown: ShownRequests) -> list[Chart]:
    """Every chart there is data for; some need the records. `shown`: those that are dots."""
    charts = [latency_over_time(results, records, shown, kind) for kind in ("TTFT", "TPOT", "E2E")]
    charts += [tokens_over_time(results), endings_over_time(results), latency_curve(records)]
    charts += [latency_histogram(records), ttft_by_prompt(results, records, shown)]
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
    return curves(
        [(name, style, values) for name, style, values in named if values], "from the intended send, or reported"
    )


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
        x_title="share of the requests",
        y_title="latency",
    )


def _percentile_series(name: str, style: str, ordered: list[float], percents: Sequence[float]) -> ChartSeries:
    points: list[Point] = [(percent, percentile(ordered, percent)) for percent in percents]
    return ChartSeries(name, style, points)
