"""The latency curves of all arms as one SVG file."""

import re
from collections.abc import Sequence
from html import escape

from loadtest.report.axes import logarithmic, percentiles
from loadtest.report.chart import HEIGHT, WIDTH, X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.statistics import percentile
from tests.bench.routing.report import OURS, figures_of
from tests.bench.routing.results import RoutingResults, Turn

_COLOURS = ("#1f66c1", "#c2410c", "#0f766e", "#7c3aed", "#92600a", "#be185d", "#4d5a63")
_TITLE, _LEGEND_LINE, _GAP = 26.0, 17.0, 12.0
_PERCENTS = [*range(0, 90, 2), *(90 + step / 2 for step in range(20)), 99.9, 100]
_STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #1d2328 } .axis { font-size: 11px; fill: #5d6870 }"
    " .title { font-size: 14px; font-weight: 600 } .grid { stroke: #e2e4e3 } .cursor { display: none }"
    " .line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round } .ours { stroke-width: 3 }"
)


def picture(results: RoutingResults) -> str:
    """TTFT and E2E percentiles of every arm, all repetitions together; empty without figures."""
    drawn = {name: turns for name, turns in results.turns.items() if figures_of(turns)}
    if not drawn:
        return ""
    legend_height = _LEGEND_LINE * len(drawn) + _GAP
    panel = _TITLE + HEIGHT + _GAP
    height = legend_height + 2 * panel
    parts = [_legend(results, drawn)]
    for number, (title, latencies) in enumerate((("TTFT", "ttft_ms"), ("E2E latency", "e2e_ms"))):
        chart = _chart(title, {name: _pooled(turns, latencies) for name, turns in drawn.items()})
        parts.append(_placed(chart, title, legend_height + number * panel))
    colours = " ".join(f".a{number} {{ color: {colour} }}" for number, colour in enumerate(_COLOURS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}">'
        f'<style>{_STYLE} {colours}</style><rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _pooled(turns: Sequence[Turn], field: str) -> list[float]:
    return sorted(value for turn in turns for value in getattr(turn, field))


def _chart(title: str, latencies: dict[str, list[float]]) -> Chart:
    fewest = min(len(values) for values in latencies.values())
    shown = [percent for percent in _PERCENTS if percent == 100 or (100 - percent) / 100 * fewest >= 1]
    series = [
        Series(name, _style(number, name), _points(values, shown))
        for number, (name, values) in enumerate(latencies.items())
    ]
    everything = [value for values in latencies.values() for value in (values[0], values[-1])]
    return Chart(
        title=title,
        note="",
        x=percentiles(fewest, X_START, X_END),
        y=logarithmic(min(everything), max(everything), Y_START, Y_END),
        series=series,
    )


def _points(ordered: Sequence[float], percents: Sequence[float]) -> list[Point]:
    return [(percent, percentile(ordered, percent)) for percent in percents]


def _style(number: int, name: str) -> str:
    return f"a{number % len(_COLOURS)}{' ours' if name == OURS else ''}"


def _placed(chart: Chart, title: str, top: float) -> str:
    """A chart's drawing, cut out of the figure that it is in a page, below its title."""
    found = re.search(r"<svg[^>]*>(.*)</svg>", chart.svg(), re.DOTALL)
    assert found is not None
    heading = f'<text class="title" x="{X_START:g}" y="{top + 18:g}">{escape(title)} by percentile</text>'
    return f'{heading}<g transform="translate(0 {top + _TITLE:g})">{found[1]}</g>'


def _legend(results: RoutingResults, drawn: dict[str, list[Turn]]) -> str:
    lines = []
    for number, (name, turns) in enumerate(drawn.items()):
        y = _LEGEND_LINE * (number + 1)
        hits = sorted(figures.hit_ratio for figures in figures_of(turns))
        text = f"{results.labels[name]}: {hits[len(hits) // 2]:.0%} of prompt tokens found in a cache"
        mark = f'<path class="line {_style(number, name)}" d="M{X_START:g} {y - 4:g}h22"/>'
        lines.append(f'{mark}<text x="{X_START + 30:g}" y="{y:g}">{escape(text)}</text>')
    return "".join(lines)
