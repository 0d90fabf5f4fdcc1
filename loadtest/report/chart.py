"""A chart as an SVG picture: lines, dots and steps over two axes. Pages draw it anew where there is a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

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
    """A titled picture of series; dots lie below them, marks (failures) on the horizontal axis.

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

    def svg(self) -> str:
        """The drawing as an element of its own."""
        size = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
        return f'<svg {size} role="img" aria-label="{escape(self.title)}">{self.drawing()}</svg>'

    def drawing(self) -> str:
        """Everything but the frame, the title and the legend."""
        parts = [_grid(self.x, self.y), self._dots(), *map(self._series, self.series), self._marks()]
        return "".join(parts)

    def legend(self) -> str:
        """What is what, as HTML."""
        items = [f'<span><i class="{series.style}"></i>{escape(series.name)}</span>' for series in self.series]
        return f'<div class="legend">{"".join(items)}</div>'

    def caption(self) -> str:
        """Title and note, as HTML."""
        return f'<b>{escape(self.title)}</b> <span class="note">{escape(self.note)}</span>'

    def _series(self, series: Series) -> str:
        runs = _runs(series.points, self.x, self.y)
        drawn = [self._whiskers(series)] if series.spread else []
        for run in runs:
            path = _path(run, series.steps)
            if series.area:
                closed = f"{path}L{run[-1][0]:.1f} {Y_START:g}L{run[0][0]:.1f} {Y_START:g}Z"
                drawn.append(f'<path class="area {series.style}" d="{closed}"/>')
            drawn.append(f'<path class="line {series.style}" d="{path}"/>')
            if len(run) == 1:
                drawn.append(f'<circle class="point {series.style}" cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="3"/>')
        return "".join(drawn)

    def _whiskers(self, series: Series) -> str:
        path = "".join(
            f"M{self.x.place(x):.1f} {self.y.place(ends[0]):.1f}V{self.y.place(ends[1]):.1f}"
            for (x, _), ends in zip(series.points, series.spread, strict=True)
            if ends is not None
        )
        return f'<path class="line {series.style}" d="{path}"/>' if path else ""

    def _dots(self) -> str:
        path = "".join(f"M{self.x.place(x):.1f} {self.y.place(y):.1f}h0" for x, y in self.dots)
        return f'<path class="dots" d="{path}"/>' if path else ""

    def _marks(self) -> str:
        path = "".join(f"M{self.x.place(x):.1f} {Y_START:g}v-7" for x in self.marks)
        return f'<path class="marks" d="{path}"/>' if path else ""


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
