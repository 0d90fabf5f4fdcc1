"""Charts below one another as one SVG file that needs no style sheet, with one legend for all."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from loadtest.report.chart import HEIGHT, WIDTH, X_START, Chart

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
    return f'{heading}<g transform="translate(0 {top + _TITLE:g})">{chart.drawing()}</g>'
