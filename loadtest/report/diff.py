"""What differs between two runs, or two series: how they were made, and what came of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.report.series import FIGURES, Point, Series, Spread

_HIGHER_IS_BETTER = {name for name in FIGURES if "per_second" in name or name in ("attainment", "hit_ratio")}
_NEITHER = {"peak_in_flight"}
# What differs between any two runs, and what is compared by its parts.
_ALWAYS = ("plan.cache_salt", "workload.seed", "environment.started_at", "environment.command")
_FLEETING = {"pid", "started_at", "clocks", "directory", "backends"}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after."""

    figure: str
    before: Spread
    after: Spread

    @property
    def relative(self) -> float | None:
        """(after - before) / before, of the medians; None where it was zero."""
        return self.after.median / self.before.median - 1 if self.before.median else None

    @property
    def better(self) -> bool | None:
        """None where it is the same, or neither is better."""
        if self.figure in _NEITHER or self.before.median == self.after.median:
            return None
        return (self.after.median > self.before.median) == (self.figure in _HIGHER_IS_BETTER)


@dataclass(frozen=True, slots=True)
class Pair:
    """One target under one load, before and after."""

    label: str
    before: Point
    after: Point

    @property
    def changes(self) -> list[Change]:
        """Of all figures that both have."""
        known = [name for name in FIGURES if name in self.before.figures and name in self.after.figures]
        return [Change(name, self.before.figures[name], self.after.figures[name]) for name in known]

    def beyond(self, change: Change) -> bool | None:
        """Whether the runs before and after lie apart; None where one side has one valid run, and so no spread."""
        if min(self.before.valid, self.after.valid) < 2:
            return None
        return change.after.low > change.before.high or change.after.high < change.before.low


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything. `made`: (what, before, after) of how they were made."""

    made: list[tuple[str, str, str]]
    pairs: list[Pair]
    unmatched: list[str]


def diff(before: Series, after: Series, made_before: Mapping[str, Any], made_after: Mapping[str, Any]) -> Diff:
    """`made_...`: what else is known of how each was made, in any nesting."""
    pairs, unmatched = _paired(before.points, after.points)
    first, other = (
        dict(_flat({"plan": one.plan, "environment": one.environment.model_dump(), **more}))
        for one, more in ((before, made_before), (after, made_after))
    )
    made = [
        (name, first.get(name, "-"), other.get(name, "-"))
        for name in dict.fromkeys([*first, *other])
        if first.get(name) != other.get(name) and not name.endswith(_ALWAYS)
    ]
    return Diff(made, pairs, unmatched)


def _paired(before: Sequence[Point], after: Sequence[Point]) -> tuple[list[Pair], list[str]]:
    """By target and load; a single target, or a single load, is the other's whatever it is called."""
    places = []
    for points in (before, after):
        one_target = all(len({point.target for point in side}) == 1 for side in (before, after))
        one_load = all(len({point.load for point in side}) == 1 for side in (before, after))
        places.append({("" if one_target else p.target, "" if one_load else p.load): p for p in points})
    first, other = places
    pairs = [Pair(_label(first[place], other[place]), first[place], other[place]) for place in first if place in other]
    unmatched = [f"only before: {_named(first[place])}" for place in first if place not in other]
    return pairs, unmatched + [f"only after: {_named(other[place])}" for place in other if place not in first]


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
