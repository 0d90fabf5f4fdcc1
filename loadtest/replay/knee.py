"""What a static limit on each engine costs: throughput, TTFT and preemptions over the limit, as one SVG file.

Arms of admission without a limit of their own are level lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html import escape

from loadtest.replay.admission import parted
from loadtest.replay.results import GridResults
from loadtest.replay.summary import Figures
from loadtest.report.axes import Axis, linear, logarithmic, nice_top
from loadtest.report.chart import HEIGHT, WIDTH, X_END, X_START, Y_END, Y_START, Chart, Point, Series

FEWEST_LIMITS = 3  # below this there is no curve
_COLOURS = ("#1f66c1", "#5d6870", "#c2410c", "#0f766e", "#7c3aed", "#92600a")
_TITLE, _LEGEND_LINE, _GAP = 26.0, 17.0, 12.0
_STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #1d2328 } .axis { font-size: 11px; fill: #5d6870 }"
    " .title { font-size: 14px; font-weight: 600 } .grid { stroke: #e2e4e3 } .cursor { display: none }"
    " .line { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round }"
)
Figure = Callable[[Figures], float]


def knee(results: GridResults, policy: str = "ours") -> str:
    """The picture for the first fleet and the highest load; empty with fewer than three static limits."""
    limits, level = _arms(results, policy)
    if len(limits) < FEWEST_LIMITS:
        return ""
    engines, load = results.fleets[0], results.loads[-1]

    def value(name: str, figure: Figure) -> float:
        return results.mean(engines, load, name, figure) or 0.0

    def series(figure: Figure) -> list[Series]:
        curve: list[Point] = [(math.log2(limit), value(name, figure)) for limit, name in limits]
        ends = (curve[0][0], curve[-1][0])
        lines = [
            Series(arm, f"k{1 + number}", [(end, value(name, figure)) for end in ends])
            for number, (arm, name) in enumerate(level)
        ]
        return [Series("static limit", "k0", curve), *lines]

    x = _limits_axis([limit for limit, _ in limits])
    panels = [
        ("tokens per second", lambda f: f.output_tokens_per_second, _from_zero),
        ("TTFT p99", lambda f: f.ttft.p99 * 1e3, _milliseconds),
        ("preemptions", lambda f: float(f.preemptions), _from_zero),
    ]
    charts = []
    for title, figure, axis in panels:
        drawn = series(figure)
        charts.append(Chart(title, "", x, axis([y for each in drawn for _, y in each.points if y is not None]), drawn))
    return _svg(charts, ["static limit", *(arm for arm, _ in level)])


def _arms(results: GridResults, policy: str) -> tuple[list[tuple[int, str]], list[tuple[str, str]]]:
    """Static limits and what they are called, and the other arms."""
    limits, level = [], []
    for name in results.policies:
        base, arm = parted(name)
        if base == policy and arm is not None:
            if arm.name.startswith("static:") and arm.limit is not None:
                limits.append((arm.limit, name))
            else:
                level.append((arm.name, name))
    return sorted(limits), level


def _limits_axis(limits: list[int]) -> Axis:
    low, high = math.log2(limits[0]), math.log2(limits[-1])
    span = high - low
    ticks = [(float(power), str(2**power)) for power in range(math.ceil(low), math.floor(high) + 1)]
    return Axis(lambda value: X_START + (value - low) / span * (X_END - X_START), ticks)


def _from_zero(values: list[float]) -> Axis:
    return linear(0.0, nice_top(max(values)), Y_START, Y_END, 4)


def _milliseconds(values: list[float]) -> Axis:
    return logarithmic(min(values), max(values), Y_START, Y_END)


def _svg(charts: list[Chart], names: list[str]) -> str:
    legend_height = _LEGEND_LINE * len(names) + _GAP
    panel = _TITLE + HEIGHT + _GAP
    legend = "".join(
        f'<path class="line k{number}" d="M{X_START:g} {_LEGEND_LINE * (number + 1) - 4:g}h22"/>'
        f'<text x="{X_START + 30:g}" y="{_LEGEND_LINE * (number + 1):g}">{escape(name)}</text>'
        for number, name in enumerate(names)
    )
    drawn = "".join(_placed(chart, legend_height + number * panel) for number, chart in enumerate(charts))
    colours = " ".join(f".k{number} {{ color: {_COLOURS[number % len(_COLOURS)]} }}" for number in range(len(names)))
    height = legend_height + len(charts) * panel
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}">'
        f'<style>{_STYLE} {colours}</style><rect width="100%" height="100%" fill="#ffffff"/>{legend}{drawn}</svg>\n'
    )


def _placed(chart: Chart, top: float) -> str:
    """A chart's drawing, cut out of the figure that it is in a page, below its title."""
    found = re.search(r"<svg[^>]*>(.*)</svg>", chart.svg(), re.DOTALL)
    assert found is not None
    heading = f'<text class="title" x="{X_START:g}" y="{top + 18:g}">{escape(chart.title)} over the limit</text>'
    return f'{heading}<g transform="translate(0 {top + _TITLE:g})">{found[1]}</g>'
