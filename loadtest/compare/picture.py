"""TTFT by percentile of all arms, as one SVG file."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.compare.columns import QUALITY, cell, has_figures, measured_arms
from loadtest.compare.ours import OURS
from loadtest.compare.schema import Comparison
from loadtest.report.axes import logarithmic, percentiles
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.sheet import sheet, style
from loadtest.report.statistics import percentile

_PERCENTS = (*range(0, 90, 2), *(90 + step / 2 for step in range(20)), 99.9, 100)
_HIT_RATE, *_ = QUALITY


def picture(comparison: Comparison) -> str:
    """All repetitions together; empty where nothing was streamed."""
    drawn = {
        name: sorted(value for figures in has_figures(comparison.turns_of(name)) for value in figures.ttft_ms)
        for name in measured_arms(comparison)
    }
    drawn = {name: values for name, values in drawn.items() if values}
    if not drawn:
        return ""
    fewest = min(len(values) for values in drawn.values())
    shown = [percent for percent in _PERCENTS if percent == 100 or (100 - percent) / 100 * fewest >= 1]
    chart = Chart(
        title="TTFT",
        note="by percentile, all repetitions together",
        x=percentiles(fewest, X_START, X_END),
        y=logarithmic(
            min(values[0] for values in drawn.values()), max(values[-1] for values in drawn.values()), Y_START, Y_END
        ),
        series=[
            Series(name, _style(number, name), _points(values, shown))
            for number, (name, values) in enumerate(drawn.items())
        ],
    )
    legend = [(_style(number, name), _legend(comparison, name)) for number, name in enumerate(drawn)]
    return sheet([chart], legend)


def _points(ordered: Sequence[float], percents: Sequence[float]) -> list[Point]:
    return [(percent, percentile(ordered, percent)) for percent in percents]


def _style(number: int, name: str) -> str:
    return style(number, strong=name == OURS)


def _legend(comparison: Comparison, name: str) -> str:
    hits = cell(comparison.turns_of(name), _HIT_RATE)
    return name if hits is None else f"{name}: {hits.middle:.0%} of prompt tokens found in a cache"
