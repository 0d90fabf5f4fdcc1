"""The latency curves of all arms as one SVG file."""

from collections.abc import Sequence

from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, ChartSeries, Point, logarithmic, percentiles
from loadtest.report.sheet import sheet, style
from loadtest.report.statistics import percentile
from tests.bench.routing.report import OURS, figures_of
from tests.bench.routing.results import RoutingResults, Turn

_PERCENTS = [*range(0, 90, 2), *(90 + step / 2 for step in range(20)), 99.9, 100]


def picture(results: RoutingResults) -> str:
    """TTFT and E2E percentiles of every arm, all repetitions together; empty without figures."""
    drawn = {name: turns for name, turns in results.turns.items() if figures_of(turns)}
    if not drawn:
        return ""
    charts = [
        _chart(title, {name: _pooled(turns, latencies) for name, turns in drawn.items()})
        for title, latencies in (("TTFT", "ttft_ms"), ("E2E latency", "e2e_ms"))
    ]
    return sheet(charts, [_legend(results, name, number) for number, name in enumerate(drawn)])


def _pooled(turns: Sequence[Turn], field: str) -> list[float]:
    return sorted(value for turn in turns for value in getattr(turn, field))


def _chart(title: str, latencies: dict[str, list[float]]) -> Chart:
    fewest = min(len(values) for values in latencies.values())
    shown = [percent for percent in _PERCENTS if percent == 100 or (100 - percent) / 100 * fewest >= 1]
    series = [
        ChartSeries(name, _style(number, name), _points(values, shown))
        for number, (name, values) in enumerate(latencies.items())
    ]
    everything = [value for values in latencies.values() for value in (values[0], values[-1])]
    return Chart(
        title=title,
        note="by percentile",
        x=percentiles(fewest, X_START, X_END),
        y=logarithmic(min(everything), max(everything), Y_START, Y_END),
        series=series,
    )


def _points(ordered: Sequence[float], percents: Sequence[float]) -> list[Point]:
    return [(percent, percentile(ordered, percent)) for percent in percents]


def _style(number: int, name: str) -> str:
    return style(number, strong=name == OURS)


def _legend(results: RoutingResults, name: str, number: int) -> tuple[str, str]:
    hits = sorted(figures.hit_ratio for figures in figures_of(results.turns[name]))
    text = f"{results.labels[name]}: {hits[len(hits) // 2]:.0%} of prompt tokens found in a cache"
    return _style(number, name), text
