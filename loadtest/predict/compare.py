"""Measured beside predicted, and whether that is near enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.report.figure import milliseconds, number, percent
from loadtest.report.statistics import percentile

WANTED_TTFT_SHARE = 0.15  # of the p50 TTFT
WANTED_HIT_POINTS = 5.0
_PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: what was measured, or what the model says. Of the same requests."""

    ttft_seconds: Sequence[float]
    e2e_seconds: Sequence[float]
    output_tokens: int
    seconds: float  # from the first arrival to the last end
    hit_ratio: float | None  # of prompt tokens


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. Ratios (`points`) differ by points of a percent, all else by a share of what was measured."""

    name: str
    measured: float
    predicted: float
    shown: Callable[[float], str]
    points: bool = False

    @property
    def difference(self) -> float:
        if self.points:
            return (self.predicted - self.measured) * 100
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def difference_told(self) -> str:
        return f"{self.difference:+.1f} points" if self.points else f"{self.difference:+.1%}"


def compared(measured: Side, predicted: Side) -> list[Line]:
    lines: list[Line] = []
    for name, ours, theirs in (
        ("TTFT", measured.ttft_seconds, predicted.ttft_seconds),
        ("E2E", measured.e2e_seconds, predicted.e2e_seconds),
    ):
        if ours and theirs:
            ours, theirs = sorted(ours), sorted(theirs)
            lines += [
                Line(f"{name} p{each}", percentile(ours, each) * 1e3, percentile(theirs, each) * 1e3, milliseconds)
                for each in _PERCENTS
            ]
    lines.append(Line("output tokens/s", _per_second(measured), _per_second(predicted), number))
    if measured.hit_ratio is not None and predicted.hit_ratio is not None:
        lines.append(Line("hit rate", measured.hit_ratio, predicted.hit_ratio, percent, points=True))
    return lines


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether p50 TTFT and hit rate are as near as wanted, and the sentence that says so."""
    by_name = {line.name: line for line in lines}
    told: list[str] = []
    fits = True
    for name, wanted, bound in (
        ("TTFT p50", WANTED_TTFT_SHARE, f"{WANTED_TTFT_SHARE:.0%}"),
        ("hit rate", WANTED_HIT_POINTS, f"{WANTED_HIT_POINTS:g} points"),
    ):
        line = by_name.get(name)
        if line is None:
            told.append(f"{name} was not measured")
            fits = False
        else:
            told.append(f"{name} {line.difference_told} (wanted: within {bound})")
            fits = fits and abs(line.difference) <= wanted
    return fits, f"The model {'fits' if fits else 'does not fit'}: {', '.join(told)}."


def _per_second(side: Side) -> float:
    return side.output_tokens / max(side.seconds, 1e-9)
