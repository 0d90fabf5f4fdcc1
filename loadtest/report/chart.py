"""A chart as data: lines, dots and steps over two axes. Pages draw it with uPlot, `sheet` as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.report.axes import Axis

WIDTH, HEIGHT = 640.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 24.0
X_START, X_END = LEFT, WIDTH - RIGHT
Y_START, Y_END = HEIGHT - BOTTOM, TOP

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """One named thing drawn. `style` is a class of the style sheet; a None breaks the line.

    `spread`: lowest and highest at each point, drawn as a whisker.
    """

    name: str
    style: str
    points: Sequence[Point]
    steps: bool = False
    area: bool = False
    spread: Sequence[tuple[float, float] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chart:
    """A titled set of series; on pages, dots lie below them, and marks (failures) on the horizontal axis.

    `x_shown`: what the points of the first series are called, where that is not the number itself.
    """

    title: str
    note: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    x_shown: Sequence[str] = field(default_factory=list)
    dots: Sequence[tuple[float, float]] = field(default_factory=list)
    marks: Sequence[float] = field(default_factory=list)
