"""Several runs, or series, beside each other on one page, each against the first; folders can be dropped on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.report.chart import STYLES, Chart
from loadtest.report.diff import Pair, Significance, change_text, colour, diff_of_many, made_of
from loadtest.report.diff_page import RunSide, distributions, over_time
from loadtest.report.document import render
from loadtest.report.files import Saved, column
from loadtest.report.series import FIGURES, UNITS, Point, Series
from loadtest.report.series_charts import series_charts, trade_off
from loadtest.report.series_tables import spread_text, title_of

_KINDS = {"attainment": "ratio", "hit_ratio": "ratio", "failed_ratio": "ratio"}


@dataclass(frozen=True, slots=True)
class _Cell:
    """A figure of one side; `style` is a class of the style sheet."""

    text: str
    change: str = ""
    style: str = ""


@dataclass(frozen=True, slots=True)
class _FigureRow:
    """A figure of all sides; the script that adds sides finds it by its column in results.csv."""

    title: str
    column: str
    kind: str
    first: float | None
    cells: list[_Cell]


@dataclass(frozen=True, slots=True)
class _Place:
    """A target under a load."""

    title: str
    target: str
    load: str
    rows: list[_FigureRow]


def many_page(saved: Sequence[Saved], checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """The whole page. `checkpoints`: what else is known of how each was made."""
    names = _names(saved)
    sides = [one.series for one in saved]
    paired = diff_of_many(sides)
    matched = [point for point in sides[0].points if any(pair.before is point for pairs in paired for pair in pairs)]
    return render(
        "many.html",
        f"{len(saved)} load tests compared",
        " · ".join(names),
        _charts(saved, names),
        more_scripts=["folders.js"],
        names=names,
        styles=[STYLES[number % len(STYLES)] for number in range(len(names))],
        saved=saved,
        made_head=("", *names),
        made=made_of(sides, checkpoints),
        places=[_place(sides, paired, point) for point in matched or sides[0].points[:1]],
        unmatched=_unmatched(sides, paired, names),
    )


def _names(saved: Sequence[Saved]) -> list[str]:
    """Folders by their last name, or by their whole path where that is not enough."""
    short = [one.folder.resolve().name for one in saved]
    counts = Counter(short)
    return [name if counts[name] == 1 else str(one.folder) for name, one in zip(short, saved, strict=True)]


def _place(sides: Sequence[Series], paired: Sequence[Sequence[Pair]], first: Point) -> _Place:
    its = [next((pair for pair in pairs if pair.before is first), None) for pairs in paired]
    rows = []
    for name in FIGURES:
        if name not in first.figures and not any(pair and name in pair.after.figures for pair in its):
            continue
        spread = first.figures.get(name)
        cells = [_Cell(spread_text(name, spread)), *(_cell(name, pair) for pair in its)]
        kind = _KINDS.get(name, UNITS[name])
        rows.append(_FigureRow(title_of(name), column(name), kind, None if spread is None else spread.median, cells))
    alone = len(sides[0].points) == 1
    return _Place("" if alone else f"{first.target} {first.load}".strip(), first.target, first.load, rows)


def _cell(name: str, pair: Pair | None) -> _Cell:
    if pair is None:
        return _Cell("-")
    text = spread_text(name, pair.after.figures.get(name))
    change = next((change for change in pair.changes if change.figure == name), None)
    if change is None:
        return _Cell(text)
    tie = ", tie" if change.significance is Significance.NO else ""
    return _Cell(text, change_text(change) + tie, colour(change) or "soft")


def _unmatched(sides: Sequence[Series], paired: Sequence[Sequence[Pair]], names: Sequence[str]) -> list[str]:
    """Targets and loads that the first side does not have."""
    found = []
    for name, side, pairs in zip(names[1:], sides[1:], paired, strict=True):
        known = [id(pair.after) for pair in pairs]
        found += [f"{name}: {p.target} {p.load}".strip() for p in side.points if id(p) not in known]
    return found


def _charts(saved: Sequence[Saved], names: Sequence[str]) -> list[Chart]:
    runs = [
        RunSide(name, STYLES[number % len(STYLES)], one.run, one.records)
        for number, (name, one) in enumerate(zip(names, saved, strict=True))
        if one.run is not None
    ]
    points = [
        point.model_copy(
            update={"target": f"{name}: {point.target}" if point.target else name, "load": point.load or name}
        )
        for name, one in zip(names, saved, strict=True)
        for point in one.series.points
    ]
    together = saved[0].series.model_copy(update={"points": points, "differences": []})
    if len(runs) == len(saved):
        return [*trade_off(together), *over_time(runs), *distributions(runs)]
    return series_charts(together)
