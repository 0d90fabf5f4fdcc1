"""Charts of what was in flight, by an event sweep over the requests: in all, and on each backend against its cap."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from loadtest.drive.record import DROPPED, Record
from loadtest.report.axes import linear, nice_top
from loadtest.report.chart import Y_END, Y_START, Chart, Point, Series
from loadtest.report.concurrency import Level, highest_within, longest_above, peak, sweep
from loadtest.report.figure import milliseconds, number
from loadtest.report.over_time import time_axis
from loadtest.report.schema import BackendGauges, PageSeries, Results

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
        y=linear(0, nice_top(top), Y_START, Y_END, 4),
        series=[Series("in flight", "s1", points, steps=True, area=True)],
    )


def on_backends(results: Results, records: Sequence[Record]) -> Iterator[Chart]:
    """Each of the busiest backends: by the client's records, by the gateway's own count, and what it may have."""
    by_backend: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        for name in (record.backend or "").split(","):
            if name and record.was_sent:
                by_backend[name].append(record)
    told = {name: (page.at, gauges) for page in _pages(results) for name, gauges in page.backends.items()}
    busiest = sorted(by_backend, key=lambda name: -len(by_backend[name]))[:_MOST_BACKENDS]
    for name in sorted(busiest):
        yield _on_backend(results, records, name, by_backend[name], told)


def _on_backend(
    results: Results,
    records: Sequence[Record],
    name: str,
    its: Sequence[Record],
    told: Mapping[str, tuple[Sequence[float], BackendGauges]],
) -> Chart:
    # The time in the gateway's line is not spent on a backend.
    spans = [(min(record.sent + (record.queue_seconds or 0.0), record.end), record.end) for record in its]
    points = _highest(spans, records)
    series = [Series("in flight, by the client", "s1", points, steps=True, area=True)]
    at, gauges = told.get(name, ((), BackendGauges()))
    moments = [x for x, _ in points]
    if any(value is not None for value in gauges.in_flight):
        series.append(Series("by the gateway", "s3", _held(moments, at, gauges.in_flight), steps=True))
    caps = [value for value in gauges.limit if value is not None]
    if caps:
        series.append(Series("cap", "bad dashed", _held(moments, at, gauges.limit), steps=True))
        cap = _against_cap(sweep(spans), min(caps), max(caps))
    else:
        cap = "cap not known: no page of the gateway's metrics was read (--metrics-url)"
    highest = max(value for one in series for _, value in one.points if value is not None)
    return Chart(
        title=f"In flight on {name}",
        note=f"peak {peak(sweep(spans))}, {cap}",
        x=time_axis(results),
        y=linear(0, nice_top(highest), Y_START, Y_END, 4),
        series=series,
    )


def _against_cap(levels: list[Level], lowest: float, highest: float) -> str:
    """The client sees an answer end after the gateway did, so for moments it counts one too many."""
    cap = f"cap {highest:g}" if lowest == highest else f"cap {lowest:g} to {highest:g}"
    above = longest_above(levels, highest)
    return f"{cap}; above it for {milliseconds(above * 1e3)} at most, as seen by the client" if above else cap


def _pages(results: Results) -> Iterator[PageSeries]:
    yield from results.samples.pages if results.samples is not None else []


def _highest(spans: Sequence[tuple[float, float]], records: Sequence[Record]) -> list[Point]:
    """The highest in each of as many columns as can be told apart."""
    length = max(record.end for record in records)
    edges = [index * length / _COLUMNS for index in range(_COLUMNS + 1)]
    highest = highest_within(sweep(spans), edges)
    return [(edges[index], float(level)) for index, level in enumerate(highest)]


def _held(moments: Sequence[float], at: Sequence[float], values: Sequence[float | None]) -> list[Point]:
    """What was told last at each of the moments; before the first telling that one."""
    return [(moment, values[max(0, bisect_right(at, moment) - 1)]) for moment in moments]
