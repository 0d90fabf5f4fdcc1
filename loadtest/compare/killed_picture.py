"""Requests a second by outcome over time, one panel for each proxy and fault, as one SVG file. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from loadtest.compare.killed_schema import Fault, Killed, KilledFigures
from loadtest.report.axes import linear, nice_top
from loadtest.report.chart import X_END, X_START, Y_END, Y_START, Chart, Point, Series
from loadtest.report.sheet import sheet, style

_ANSWERED, _LOST, _MOMENT = style(0), style(1, strong=True), style(6)
_GOES = {Fault.KILL: "killed", Fault.HANG: "hanging"}


def picture(killed: Killed, arms: Sequence[str]) -> str:
    """Of those arms, all repetitions together; empty where nothing was measured."""
    drawn = {
        (arm, fault): [turn.figures for turn in killed.turns_of(arm, fault) if turn.figures]
        for fault in Fault
        for arm in arms
    }
    drawn = {key: found for key, found in drawn.items() if found}
    if not drawn:
        return ""
    right = max(span.start + _width(one) for found in drawn.values() for one in found for span in one.spans)
    top = max(value or 0.0 for found in drawn.values() for series in _rates(found) for _, value in series)
    charts = [_chart(f"{arm}, engine {_GOES[fault]}:", found, right, top) for (arm, fault), found in drawn.items()]
    legend = [(_ANSWERED, "requests a second that were answered, by when they were sent"), (_LOST, "that were lost")]
    return sheet(charts, [*legend, (_MOMENT, "the engine goes; it is let back; it serves again")])


def _chart(title: str, found: Sequence[KilledFigures], right: float, top: float) -> Chart:
    answered, lost = _rates(found)
    high = nice_top(top)
    moments = [median(getattr(one, name) for one in found) for name in ("gone", "let_back", "serving")]
    series = [Series("moment", _MOMENT, [(moment, 0.0), (moment, high)]) for moment in dict.fromkeys(moments)]
    series += [
        Series("answered", _ANSWERED, answered, steps=True),
        Series("lost", _LOST, lost, steps=True),
    ]
    note = "requests a second over seconds"
    x, y = linear(0, right, X_START, X_END, 6, " s"), linear(0, high, Y_START, Y_END, 4)
    return Chart(title=title, note=note, x=x, y=y, series=series)


def _rates(found: Sequence[KilledFigures]) -> tuple[list[Point], list[Point]]:
    """Answered and lost requests a second, the mean of the repetitions."""
    answered: dict[float, float] = defaultdict(float)
    lost: dict[float, float] = defaultdict(float)
    for one in found:
        weight = 1 / _width(one) / len(found)
        for span in one.spans:
            answered[span.start] += span.answered * weight
            lost[span.start] += span.lost * weight
    end = max(answered) + _width(found[0])
    return _to_the_end(answered, end), _to_the_end(lost, end)


def _to_the_end(rates: Mapping[float, float], end: float) -> list[Point]:
    """A step begins at its point: the last one needs another."""
    points: list[Point] = [*sorted(rates.items())]
    return [*points, (end, points[-1][1])]


def _width(figures: KilledFigures) -> float:
    return figures.spans[1].start if len(figures.spans) > 1 else 1.0
