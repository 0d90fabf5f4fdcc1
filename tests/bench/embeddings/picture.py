"""Requests per second and latency over the number of clients, as one SVG file."""

from collections.abc import Sequence

from loadtest.report.chart import (
    X_END,
    X_START,
    Y_END,
    Y_START,
    Chart,
    ChartSeries,
    doubling,
    linear,
    logarithmic,
    nice_top,
)
from loadtest.report.sheet import sheet, style
from tests.bench.embeddings.run import Sample, arms_in, middle

_NAMES = {
    "direct": "direct",
    "not batching": "gateway, coalesce: false",
    "batching": "gateway",
}


def picture(samples: Sequence[Sample]) -> str:
    """Medians of every arm; empty where there are fewer than two numbers of clients."""
    clients = sorted({sample.clients for sample in samples})
    if len(clients) < 2:
        return ""
    rates = _series(samples, clients, "per_second")
    latencies = _series(samples, clients, "p50_ms")
    top = nice_top(max(_values(rates)))
    x = doubling(clients, clients[0], clients[-1], X_START, X_END)
    charts = [
        Chart("requests per second", note="over clients", x=x, y=linear(0, top, Y_START, Y_END, 4), series=rates),
        Chart(
            "p50 latency",
            note="over clients",
            x=x,
            y=logarithmic(min(_values(latencies)), max(_values(latencies)), Y_START, Y_END),
            series=latencies,
        ),
    ]
    return sheet(charts, [(_style(number, arm), _NAMES[arm]) for number, arm in enumerate(arms_in(samples))])


def _style(number: int, arm: str) -> str:
    return style(number, strong=arm == "batching")


def _series(samples: Sequence[Sample], clients: Sequence[int], figure: str) -> list[ChartSeries]:
    return [
        ChartSeries(_NAMES[arm], _style(number, arm), [(float(at), middle(samples, arm, at, figure)) for at in clients])
        for number, arm in enumerate(arms_in(samples))
    ]


def _values(series: Sequence[ChartSeries]) -> list[float]:
    return [y for each in series for _, y in each.points if y is not None]
