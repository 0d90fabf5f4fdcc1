"""Rules that fail a comparison: `ttft_p95>+5%`, `output_tokens_per_second<-3%`, `hit_ratio<0.5`, `failed_ratio>0`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.report.diff import Pair
from loadtest.report.figure import number
from loadtest.report.series import FIGURES, UNITS, Point

_RULE = re.compile(r"\s*(\w+)\s*([<>])\s*([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*")


class RuleError(ValueError):
    """A rule that cannot be read; the message says why, for the user."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Fails what is above or below the bound: the value itself, its change, or its change in percent."""

    text: str
    figure: str
    above: bool
    bound: float
    change: bool
    percent: bool

    def broken_by(self, before: float | None, after: float) -> str | None:
        """Why it is broken. `before` is needed for a change."""
        unit = UNITS[self.figure] if UNITS[self.figure] == "ms" else ""
        if not self.change or before is None:
            found, told = after, f"is {number(after)} {unit}".rstrip()
        else:
            found = _percents(before, after) if self.percent else after - before
            told = f"went from {number(before)} to {number(after)} {unit}".rstrip()
            told += f" ({found:+.1f}%)" if self.percent else ""
        return f"{self.figure} {told}" if (found > self.bound if self.above else found < self.bound) else None


def _percents(before: float, after: float) -> float:
    if before:
        return (after / before - 1) * 100
    return math.inf if after else 0.0


def rule_of(text: str) -> Rule:
    """Reads a rule: a figure's name, > or <, and a number; a sign makes it a change, which % makes a relative one."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise RuleError(f"{text!r}: a rule is such as 'ttft_p95>+5%' (a change), 'ttft_p95>+20', or 'ttft_p95>500'")
    figure, direction, sign, bound, percent = found.groups()
    if figure not in FIGURES:
        raise RuleError(f"{text!r}: no figure is called {figure}; there are {', '.join(FIGURES)}")
    if percent and not sign:
        raise RuleError(f"{text!r}: a percentage is a change, so it has a sign: {figure}{direction}+{bound}%")
    return Rule(text.strip(), figure, direction == ">", float(sign + bound), bool(sign), bool(percent))


def broken(rules: Sequence[Rule], pairs: Sequence[Pair]) -> list[str]:
    """What each rule finds, pair by pair. Figures that cannot be believed, or are not there, break it."""
    if not pairs:
        return ["nothing was measured in both"] if rules else []
    return [told for rule in rules for pair in pairs for told in _broken(rule, pair)]


def _broken(rule: Rule, pair: Pair) -> Iterator[str]:
    place = f"{pair.label}: " if pair.label else ""
    sides = [("before", pair.before), ("after", pair.after)] if rule.change else [("after", pair.after)]
    complaints = [complaint for side, point in sides for complaint in _unusable(rule, side, point)]
    if complaints:
        yield from (f"{place}{complaint} [{rule.text}]" for complaint in complaints)
        return
    before = pair.before.figures[rule.figure].median if rule.change else None
    told = rule.broken_by(before, pair.after.figures[rule.figure].median)
    if told is not None:
        yield f"{place}{told} [{rule.text}]"


def _unusable(rule: Rule, side: str, point: Point) -> Iterator[str]:
    if not point.valid:
        yield f"no valid run {side}"
    elif rule.figure not in point.figures:
        yield f"no {rule.figure} {side}"
