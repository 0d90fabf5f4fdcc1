"""A chart as data: scales, ticks, lines, dots and steps. Pages draw it with uPlot, `sheet` as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

STYLES = tuple(f"s{number}{dashes}" for dashes in ("", " dashed") for number in range(1, 7))  # of lines
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from `low` to `high` to pixels; has the places and labels of its ticks."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]
    _: KW_ONLY
    low: float
    high: float
    unit: str = ""
    even: bool = True


def linear(low: float, high: float, start_px: float, end_px: float, wanted: int = 5, unit: str = "") -> Axis:
    """An even axis from `low` to `high`, with about `wanted` round ticks."""
    span = max(high - low, 1e-12)
    step = nice_step(span / wanted)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9) + (step / 10 ** math.floor(math.log10(step)) == 2.5))
    values = [index * step for index in range(first, last + 1)]
    ticks = [(value, _ms(value) if unit == " ms" else f"{value:,.{decimals}f}{unit}") for value in values]
    return Axis(
        lambda value: start_px + (value - low) / span * (end_px - start_px), ticks, low=low, high=high, unit=unit
    )


def logarithmic(low: float, high: float, start_px: float, end_px: float) -> Axis:
    """A log axis of milliseconds over whole 1-2-5 steps around the values."""
    low = _below(low)
    high = _above(max(high, low * 1.01))
    span = math.log(high / low)
    ticks = [(value, _ms(value)) for value in _one_two_five(low, high)]
    if len(ticks) > 7:
        ticks = [tick for tick in ticks if math.isclose(math.log10(tick[0]) % 1, 0, abs_tol=1e-9)]
    return Axis(
        lambda v: start_px + math.log(max(v, low) / low) / span * (end_px - start_px),
        ticks,
        low=low,
        high=high,
        unit=" ms",
        even=False,
    )


def doubling(marked: Sequence[int], low: float, high: float, start_px: float, end_px: float) -> Axis:
    """A log axis of numbers above zero, with ticks at the marked ones."""
    span = math.log2(high / low)
    ticks = [(float(value), str(value)) for value in marked]
    return Axis(
        lambda value: start_px + math.log2(value / low) / span * (end_px - start_px),
        ticks,
        low=low,
        high=high,
        even=False,
    )


def percentiles(count: int, start_px: float, end_px: float) -> Axis:
    """An axis of percentiles on which each nine takes the same room, as far as `count` values carry."""
    nines = max(1.0, math.log10(max(count, 10)))
    known = [(0.0, "0"), (50.0, "p50"), (90.0, "p90"), (99.0, "p99"), (99.9, "p99.9"), (99.99, "p99.99")]
    ticks = [(value, name) for value, name in known if _nines(value) <= nines + 1e-9]
    return Axis(
        lambda v: start_px + min(_nines(v), nines) / nines * (end_px - start_px), ticks, low=0.0, high=100.0, even=False
    )


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))


def nice_top(value: float, wanted: int = 4) -> float:
    """The end of an axis from zero that has `value` on it and ends with a tick."""
    if value <= 0:
        return 1.0
    step = nice_step(value / wanted)
    return step * math.ceil(value / step - 1e-9)


def _nines(percent: float) -> float:
    return -math.log10(max(1 - percent / 100, 1e-9))


def _one_two_five(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = (factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5))
    return [value for value in every if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def _below(value: float) -> float:
    value = max(value, 0.01)
    return max(step for step in _one_two_five(value / 10, value) if step <= value * (1 + 1e-9))


def _above(value: float) -> float:
    value = max(value, 0.02)
    return min(step for step in _one_two_five(value, value * 10) if step >= value * (1 - 1e-9))


def _ms(value: float) -> str:
    return f"{value / 1000:.6g} s" if value >= 1000 else f"{value:.6g} ms"


WIDTH, HEIGHT = 640.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 24.0
X_START, X_END = LEFT, WIDTH - RIGHT
Y_START, Y_END = HEIGHT - BOTTOM, TOP

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One named thing drawn. `style` is a class of the style sheet, `apart` has no line; a None breaks the line.

    `spread`: lowest and highest at each point, drawn as a whisker.
    """

    name: str
    style: str
    points: Sequence[Point]
    _: KW_ONLY
    steps: bool = False
    area: bool = False
    spread: Sequence[tuple[float, float] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chart:
    """A titled set of series; on pages, dots lie below them, and marks (failures) on the horizontal axis.

    `x_shown`: labels of the first series' points, if not the number itself. `bounds`: level lines with a name, such as
    the limits of an SLO; one outside the vertical axis is not drawn. `uprights`: the same on the horizontal axis.
    `dot_rows`: which of the shown requests each dot is. `labels`: texts at points; `ringed`: points that stand out.
    `routes`: a style and points that are joined in their own order, not from left to right.
    """

    title: str
    _: KW_ONLY
    note: str
    x: Axis
    y: Axis
    series: Sequence[ChartSeries]
    x_shown: Sequence[str] = field(default_factory=list)
    dots: Sequence[tuple[float, float]] = field(default_factory=list)
    dot_rows: Sequence[int] = field(default_factory=list)
    marks: Sequence[float] = field(default_factory=list)
    x_title: str = ""
    y_title: str = ""
    bounds: Sequence[tuple[float, str]] = field(default_factory=list)
    uprights: Sequence[tuple[float, str]] = field(default_factory=list)
    labels: Sequence[tuple[float, float, str]] = field(default_factory=list)
    ringed: Sequence[tuple[float, float]] = field(default_factory=list)
    routes: Sequence[tuple[str, Sequence[tuple[float, float]]]] = field(default_factory=list)
