"""Differences between two runs, or two series, in setup and in figures, and rules that fail on them. Pure.

Rules look like `ttft_p95>+5%`, `output_tokens_per_second<-3%`, `hit_ratio<0.5`, `failed_ratio>0`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Any

from loadtest.report.formatting import number
from loadtest.report.schema import redefined
from loadtest.report.series import FIGURES, UNITS, Point, Series, Spread, place_of
from loadtest.report.series_tables import spread_text, title_of
from loadtest.report.statistics import can_tell, mann_whitney, significant

_HIGHER_IS_BETTER = {
    name for name in FIGURES if "per_second" in name or name in ("attainment", "hit_ratio", "tokens_per_joule")
}
_NEITHER = {"peak_in_flight", "gpu_percent", "gpu_watts"}
# Fields that differ between any two runs, and fields that are compared by their parts.
_ALWAYS = ("plan.cache_salt", "workload.seed", "environment.started_at", "environment.command")
_FLEETING = {"pid", "started_at", "clocks", "directory", "backends"}


class Significance(StrEnum):
    """Whether two sides differ significantly."""

    YES = "yes"
    NO = "no, tie"
    TOO_FEW = "too few runs"
    REDEFINED = "defined otherwise"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after."""

    figure: str
    before: Spread
    after: Spread
    _: KW_ONLY
    significance: Significance = Significance.TOO_FEW

    @property
    def relative(self) -> float | None:
        """(after - before) / before, of the medians; None where it was zero."""
        return self.after.median / self.before.median - 1 if self.before.median else None

    @property
    def better(self) -> bool | None:
        """None where the difference is not significant, or neither is better."""
        if self.figure in _NEITHER or self.significance is not Significance.YES:
            return None
        return (self.after.median > self.before.median) == (self.figure in _HIGHER_IS_BETTER)


@dataclass(frozen=True, slots=True)
class Pair:
    """One target under one load, before and after. `changes`: of all figures that both have."""

    label: str
    before: Point
    after: Point
    _: KW_ONLY
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything. `made`: (what, before, after) of how they were made."""

    made: list[tuple[str, ...]]
    pairs: list[Pair]
    unmatched: list[str]


def diff(before: Series, after: Series, made_before: Mapping[str, Any], made_after: Mapping[str, Any]) -> Diff:
    """`made_...`: further facts about the making of each, in any nesting."""
    pairs, unmatched = _paired(before.points, after.points)
    made = made_of((before, after), (made_before, made_after))
    return Diff(made, _judged(pairs, _unlike(before, after)), unmatched)


def diff_of_many(sides: Sequence[Series]) -> list[list[Pair]]:
    """Each of the others against the first one; all figures of all of them are tested together."""
    first, *others = sides
    paired = [_paired(first.points, other.points)[0] for other in others]
    unlike = {name for other in others for name in _unlike(first, other)}
    judged = iter(_judged([pair for pairs in paired for pair in pairs], unlike))
    return [[next(judged) for _ in pairs] for pairs in paired]


def made_of(sides: Sequence[Series], more: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Differences in how the sides were made: key, and its value for each. `more`: further facts of each."""
    found = [
        dict(_flat({"plan": one.plan, "environment": one.environment.model_dump(), **its}))
        for one, its in zip(sides, more, strict=True)
    ]
    return [
        (name, *(one.get(name, "-") for one in found))
        for name in dict.fromkeys(name for one in found for name in one)
        if len({one.get(name) for one in found}) > 1 and not name.endswith(_ALWAYS)
    ]


def _unlike(before: Series, after: Series) -> set[str]:
    """Figures that the two define otherwise."""
    return {name for name in FIGURES if redefined(place_of(name), before.definitions, after.definitions)}


def _judged(pairs: Sequence[Pair], unlike: Collection[str]) -> list[Pair]:
    """All figures of all pairs are tested together: the more there are, the more a single one must differ."""
    known, p_values = dict[tuple[int, str], Significance](), dict[tuple[int, str], float]()
    for place, pair in enumerate(pairs):
        for change in pair.changes:
            before, after = change.before.values, change.after.values
            if change.figure in unlike:
                known[place, change.figure] = Significance.REDEFINED
            elif pair.before.valid and pair.after.valid and can_tell(len(before), len(after)):
                known[place, change.figure] = Significance.NO
                if len({*before, *after}) > 1:  # a constant value is no test
                    p_values[place, change.figure] = mann_whitney(before, after)
    known |= dict.fromkeys(significant(p_values), Significance.YES)
    return [
        replace(
            pair,
            changes=[
                replace(change, significance=known.get((place, change.figure), Significance.TOO_FEW))
                for change in pair.changes
            ],
        )
        for place, pair in enumerate(pairs)
    ]


def _paired(before: Sequence[Point], after: Sequence[Point]) -> tuple[list[Pair], list[str]]:
    """By target and load; a single target, or a single load, matches the other's under any name."""
    places = []
    for points in (before, after):
        one_target = all(len({point.target for point in side}) == 1 for side in (before, after))
        one_load = all(len({point.load for point in side}) == 1 for side in (before, after))
        places.append({("" if one_target else p.target, "" if one_load else p.load): p for p in points})
    first, other = places
    pairs = [_pair(first[place], other[place]) for place in first if place in other]
    unmatched = [f"only before: {_named(first[place])}" for place in first if place not in other]
    return pairs, unmatched + [f"only after: {_named(other[place])}" for place in other if place not in first]


def _pair(before: Point, after: Point) -> Pair:
    known = [name for name in FIGURES if name in before.figures and name in after.figures]
    changes = [Change(name, before.figures[name], after.figures[name]) for name in known]
    return Pair(_label(before, after), before, after, changes=changes)


def _label(before: Point, after: Point) -> str:
    one, two = _named(before), _named(after)
    return one if one == two else f"{one or 'before'}, then {two or 'after'}"


def _named(point: Point) -> str:
    return f"{point.target} {point.load}".strip()


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and texts; parts of a list are called by their own names where they have some."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name not in _FLEETING:
                yield from _flat(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        for number, part in enumerate(value):
            yield from _flat(part, f"{path}.{part.get('name', number)}")
    elif value is not None:
        yield path, value if isinstance(value, str) else json.dumps(value)


MADE_HEAD = ("", "before", "after")
FIGURES_HEAD = ("", "before", "after", "change", "significant")


def figure_rows(pair: Pair) -> Iterator[tuple[Change, list[str]]]:
    for change in pair.changes:
        figures = [spread_text(change.figure, spread) for spread in (change.before, change.after)]
        yield change, [title_of(change.figure), *figures, change_text(change), change.significance]


def colour(change: Change) -> str | None:
    """`better` or `worse`; None where that cannot be said."""
    return None if change.better is None else "better" if change.better else "worse"


def change_text(change: Change) -> str:
    """The change in percent of the former value."""
    if change.before.median == change.after.median:
        return "same"
    return "from zero" if change.relative is None else f"{change.relative:+.1%}"


_RULE = re.compile(r"\s*(\w+)\s*([<>])\s*([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*")


class RuleError(ValueError):
    """A rule that cannot be read; the message says why, for the user."""


@dataclass(frozen=True, slots=True)
class FailRule:
    """Fails above or below the bound: of the value itself, its change, or its change in percent."""

    text: str
    figure: str
    _: KW_ONLY
    above: bool
    bound: float
    change: bool
    percent: bool

    def broken_by(self, before: float | None, after: float) -> str | None:
        """Why it is broken. `before` is needed for a change."""
        unit = UNITS[self.figure] if UNITS[self.figure] == "ms" else ""
        if not self.change or before is None:
            found, text = after, f"is {number(after)} {unit}".rstrip()
        else:
            found = _percents(before, after) if self.percent else after - before
            text = f"went from {number(before)} to {number(after)} {unit}".rstrip()
            text += f" ({found:+.1f}%)" if self.percent else ""
        return f"{self.figure} {text}" if (found > self.bound if self.above else found < self.bound) else None


def _percents(before: float, after: float) -> float:
    if before:
        return (after / before - 1) * 100
    return math.inf if after else 0.0


def rule_of(text: str) -> FailRule:
    """Reads a rule: a figure's name, > or <, and a number; a sign makes it a change, which % makes a relative one."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise RuleError(f"{text!r}: a rule is such as 'ttft_p95>+5%' (a change), 'ttft_p95>+20', or 'ttft_p95>500'")
    figure, direction, sign, bound, percent = found.groups()
    if figure not in FIGURES:
        raise RuleError(f"{text!r}: no figure is called {figure}; there are {', '.join(FIGURES)}")
    if percent and not sign:
        raise RuleError(f"{text!r}: a percentage is a change, so it has a sign: {figure}{direction}+{bound}%")
    return FailRule(
        text.strip(),
        figure,
        above=direction == ">",
        bound=float(sign + bound),
        change=bool(sign),
        percent=bool(percent),
    )


def broken(rules: Sequence[FailRule], pairs: Sequence[Pair]) -> list[str]:
    """The findings of each rule, pair by pair. Untrustworthy or missing figures break it."""
    if not pairs:
        return ["nothing was measured in both"] if rules else []
    return [text for rule in rules for pair in pairs for text in _broken(rule, pair)]


def _broken(rule: FailRule, pair: Pair) -> Iterator[str]:
    place = f"{pair.label}: " if pair.label else ""
    sides = [("before", pair.before), ("after", pair.after)] if rule.change else [("after", pair.after)]
    complaints = [complaint for side, point in sides for complaint in _unusable(rule, side, point)]
    if complaints:
        yield from (f"{place}{complaint} [{rule.text}]" for complaint in complaints)
        return
    before = pair.before.figures[rule.figure].median if rule.change else None
    text = rule.broken_by(before, pair.after.figures[rule.figure].median)
    if text is not None:
        yield f"{place}{text} [{rule.text}]"


def _unusable(rule: FailRule, side: str, point: Point) -> Iterator[str]:
    if not point.valid:
        yield f"no valid run {side}"
    elif rule.figure not in point.figures:
        yield f"no {rule.figure} {side}"
