"""What differs between two runs, or two series: how they were made, and what came of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from loadtest.report.definitions import redefined
from loadtest.report.inference import can_tell, mann_whitney, significant
from loadtest.report.series import FIGURES, Point, Series, Spread, place_of

_HIGHER_IS_BETTER = {name for name in FIGURES if "per_second" in name or name in ("attainment", "hit_ratio")}
_NEITHER = {"peak_in_flight"}
# What differs between any two runs, and what is compared by its parts.
_ALWAYS = ("plan.cache_salt", "workload.seed", "environment.started_at", "environment.command")
_FLEETING = {"pid", "started_at", "clocks", "directory", "backends"}


class Significance(StrEnum):
    """Whether the runs of two sides tell them apart."""

    YES = "yes"
    NO = "no"
    TOO_FEW = "too few runs"
    REDEFINED = "defined otherwise"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after."""

    figure: str
    before: Spread
    after: Spread
    significance: Significance = Significance.TOO_FEW

    @property
    def relative(self) -> float | None:
        """(after - before) / before, of the medians; None where it was zero."""
        return self.after.median / self.before.median - 1 if self.before.median else None

    @property
    def better(self) -> bool | None:
        """None where the runs do not tell them apart, or neither is better."""
        if self.figure in _NEITHER or self.significance is not Significance.YES:
            return None
        return (self.after.median > self.before.median) == (self.figure in _HIGHER_IS_BETTER)


@dataclass(frozen=True, slots=True)
class Pair:
    """One target under one load, before and after. `changes`: of all figures that both have."""

    label: str
    before: Point
    after: Point
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything. `made`: (what, before, after) of how they were made."""

    made: list[tuple[str, str, str]]
    pairs: list[Pair]
    unmatched: list[str]


def diff(before: Series, after: Series, made_before: Mapping[str, Any], made_after: Mapping[str, Any]) -> Diff:
    """`made_...`: what else is known of how each was made, in any nesting."""
    pairs, unmatched = _paired(before.points, after.points)
    unlike = {name for name in FIGURES if redefined(place_of(name), before.definitions, after.definitions)}
    first, other = (
        dict(_flat({"plan": one.plan, "environment": one.environment.model_dump(), **more}))
        for one, more in ((before, made_before), (after, made_after))
    )
    made = [
        (name, first.get(name, "-"), other.get(name, "-"))
        for name in dict.fromkeys([*first, *other])
        if first.get(name) != other.get(name) and not name.endswith(_ALWAYS)
    ]
    return Diff(made, _judged(pairs, unlike), unmatched)


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
                if len({*before, *after}) > 1:  # what is always the same is no test
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
    """By target and load; a single target, or a single load, is the other's whatever it is called."""
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
    return Pair(_label(before, after), before, after, changes)


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
