"""Charts below one another as one SVG file that needs no style sheet, with one legend for all."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from loadtest.report.chart import HEIGHT, WIDTH, X_END, X_START, Y_START, Axis, Chart, ChartSeries, Point

_COLOURS = ("#1f66c1", "#c2410c", "#0f766e", "#7c3aed", "#92600a", "#be185d", "#4d5a63")
_TITLE, _LEGEND_LINE, _GAP = 26.0, 17.0, 12.0
_STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #1d2328 } .axis { font-size: 11px; fill: #5d6870 }"
    " .title { font-size: 14px; font-weight: 600 } .grid { stroke: #e2e4e3 }"
    " .line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round } .strong { stroke-width: 3 }"
    " .point { fill: currentColor }"
)


def style(number: int, *, strong: bool = False) -> str:
    """The class of the series of this number."""
    return f"s{number % len(_COLOURS)}{' strong' if strong else ''}"


def sheet(charts: Sequence[Chart], legend: Sequence[tuple[str, str]]) -> str:
    """The file. `legend`: `style` and text of each kind of line."""
    top = _LEGEND_LINE * len(legend) + _GAP
    panel = _TITLE + HEIGHT + _GAP
    height = top + panel * len(charts)
    drawn = "".join(_placed(chart, top + number * panel) for number, chart in enumerate(charts))
    colours = " ".join(f".s{number} {{ color: {colour} }}" for number, colour in enumerate(_COLOURS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}">'
        f'<style>{_STYLE} {colours}</style><rect width="100%" height="100%" fill="#ffffff"/>'
        f"{_legend(legend)}{drawn}</svg>\n"
    )


def _legend(legend: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<path class="line {style}" d="M{X_START:g} {_LEGEND_LINE * line - 4:g}h22"/>'
        f'<text x="{X_START + 30:g}" y="{_LEGEND_LINE * line:g}">{escape(text)}</text>'
        for line, (style, text) in enumerate(legend, 1)
    )


def _placed(chart: Chart, top: float) -> str:
    """A chart's drawing below its title."""
    heading = f'<text class="title" x="{X_START:g}" y="{top + 18:g}">{escape(f"{chart.title} {chart.note}")}</text>'
    return f'{heading}<g transform="translate(0 {top + _TITLE:g})">{_drawing(chart)}</g>'


def _drawing(chart: Chart) -> str:
    return _grid(chart.x, chart.y) + "".join(_line(series, chart.x, chart.y) for series in chart.series)


def _line(series: ChartSeries, x: Axis, y: Axis) -> str:
    drawn = []
    for run in _runs(series.points, x, y):
        drawn.append(f'<path class="line {series.style}" d="{_path(run, series.steps)}"/>')
        if len(run) == 1:
            drawn.append(f'<circle class="point {series.style}" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="3"/>')
    return "".join(drawn)


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for value, label in y.ticks:
        at = y.place(value)
        parts.append(f'<line class="grid" x1="{X_START:g}" x2="{X_END:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="axis" x="{X_START - 7:g}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in x.ticks:
        at = x.place(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{Y_START:g}" y2="{Y_START + 4:g}"/>')
        parts.append(f'<text class="axis" x="{at:.1f}" y="{Y_START + 16:g}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _runs(points: Sequence[Point], x: Axis, y: Axis) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((x.place(at), y.place(value)))
    return [run for run in runs if run]


def _path(run: list[tuple[float, float]], steps: bool) -> str:
    first, *rest = run
    path = [f"M{first[0]:.1f} {first[1]:.1f}"]
    for at, value in rest:
        path.append(f"H{at:.1f}V{value:.1f}" if steps else f"L{at:.1f} {value:.1f}")
    return "".join(path)
