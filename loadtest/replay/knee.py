"""What a static limit on each engine costs: throughput, TTFT and preemptions over the limit, as one SVG file.

Arms of admission without a limit of their own are level lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from loadtest.replay.admission import parted
from loadtest.replay.results import GridResults
from loadtest.replay.summary import Figures
from loadtest.report.axes import Axis, doubling, linear, logarithmic, nice_top
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.sheet import sheet, style

FEWEST_LIMITS = 3  # below this there is no curve
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
        curve: list[Point] = [(float(limit), value(name, figure)) for limit, name in limits]
        ends = (curve[0][0], curve[-1][0])
        lines = [
            Series(arm, style(1 + number), [(end, value(name, figure)) for end in ends])
            for number, (arm, name) in enumerate(level)
        ]
        return [Series("static limit", style(0), curve), *lines]

    x = _limits_axis([limit for limit, _ in limits])
    panels = [
        ("tokens per second", lambda f: f.output_tokens_per_second, _from_zero),
        ("TTFT p99", lambda f: f.ttft.p99 * 1e3, _milliseconds),
        ("preemptions", lambda f: float(f.preemptions), _from_zero),
    ]
    charts = []
    for title, figure, axis in panels:
        drawn = series(figure)
        charts.append(
            Chart(
                title, "over the limit", x, axis([y for each in drawn for _, y in each.points if y is not None]), drawn
            )
        )
    names = ["static limit", *(arm for arm, _ in level)]
    return sheet(charts, [(style(number), name) for number, name in enumerate(names)])


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
    powers = range(math.ceil(math.log2(limits[0])), math.floor(math.log2(limits[-1])) + 1)
    return doubling([2**power for power in powers], limits[0], limits[-1], X_START, X_END)


def _from_zero(values: list[float]) -> Axis:
    return linear(0.0, nice_top(max(values)), Y_START, Y_END, 4)


def _milliseconds(values: list[float]) -> Axis:
    return logarithmic(min(values), max(values), Y_START, Y_END)
