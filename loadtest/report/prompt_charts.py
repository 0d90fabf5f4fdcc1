"""Charts of single requests: how latencies are spread, and how the first token depends on the prompt. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadtest.drive.record import Record
from loadtest.report.chart import (
    X_END,
    X_START,
    Y_END,
    Y_START,
    Chart,
    ChartSeries,
    linear,
    logarithmic,
    nice_top,
)
from loadtest.report.formatting import milliseconds
from loadtest.report.schema import Results
from loadtest.report.single_requests import ShownRequests, ttft_seconds
from loadtest.report.statistics import percentile

_LEAST = 20  # requests below which neither picture says more than the table
_BINS = 40
_LENGTHS = 12


def latency_histogram(records: Sequence[Record]) -> Chart | None:
    """Requests by TTFT and by E2E, in bins that are equally wide on a logarithmic axis."""
    good = [record for record in records if record.ok]
    ttft = [(record.first_token - record.due) * 1e3 for record in good if record.first_token is not None]
    named = [("TTFT", "s1", ttft), ("E2E", "s2", [(record.end - record.due) * 1e3 for record in good])]
    shown = [(name, style, [max(value, 0.01) for value in values]) for name, style, values in named if values]
    if len(good) < _LEAST or not shown:
        return None
    low, high = min(min(values) for _, _, values in shown), max(max(values) for _, _, values in shown)
    axis = logarithmic(low, high, X_START, X_END)
    width = math.log(axis.high / axis.low) / _BINS
    edges = [axis.low * math.exp(width * index) for index in range(_BINS + 1)]
    lines = []
    for name, style, values in shown:
        counts = [0] * (_BINS + 1)
        for value in values:
            counts[min(_BINS - 1, int(math.log(value / axis.low) / width))] += 1
        lines.append(ChartSeries(name, style, list(zip(edges, map(float, counts), strict=True)), steps=True, area=True))
    top = max(value or 0 for line in lines for _, value in line.points)
    return Chart(
        title="Histogram of latency",
        note="from the intended send",
        x=axis,
        y=linear(0, nice_top(top), start_px=Y_START, end_px=Y_END, wanted=4),
        series=lines,
        x_shown=[f"from {edge:.3g} ms" for edge in edges],
        x_title="latency",
        y_title="requests",
    )


def ttft_by_prompt(results: Results, records: Sequence[Record], shown: ShownRequests) -> Chart | None:
    """Shows what prefill costs, and what the prefix cache saves: dots below the line of their length were hits."""
    found = [place for record in records if (place := _ttft_at(record)) is not None]
    if len(found) < _LEAST or min(found)[0] == max(found)[0]:
        return None
    found.sort()
    size = -(-len(found) // _LENGTHS)
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    medians = {part[len(part) // 2][0]: percentile(sorted(value for _, value in part), 50) for part in parts}
    bound = None if results.slo is None else results.slo.ttft_ms
    values = [value for _, value in found] + ([] if bound is None else [bound])
    top = nice_top(found[-1][0])
    dots, rows = shown.dots(_ttft_at)
    return Chart(
        title="TTFT by prompt length",
        note="dots are requests, a click opens one; the line is their median",
        x=linear(0, top, start_px=X_START, end_px=X_END, wanted=6),
        y=logarithmic(min(values), max(values), Y_START, Y_END),
        series=[ChartSeries("median", "s1", list(medians.items()))],
        dots=dots,
        dot_rows=rows,
        x_title="prompt tokens",
        y_title="TTFT",
        bounds=[] if bound is None else [(bound, f"SLO: {milliseconds(bound)}")],
    )


def _ttft_at(record: Record) -> tuple[float, float] | None:
    """Prompt tokens and milliseconds; None where one of them is not known."""
    seconds = ttft_seconds(record)
    return None if seconds is None or not record.prompt_tokens else (float(record.prompt_tokens), seconds * 1e3)
