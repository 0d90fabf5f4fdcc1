"""A diff as rows of text: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator

from loadtest.report.diff import Change, Diff, Pair
from loadtest.report.series import Spread
from loadtest.report.series_tables import title_of, told_figure

MADE_HEAD = ("", "before", "after")
FIGURES_HEAD = ("", "before", "after", "change", "beyond the spread")


def made_rows(found: Diff) -> list[list[str]]:
    """How the two were made, where that differs."""
    return [list(row) for row in found.made]


def figure_rows(pair: Pair) -> Iterator[tuple[Change, list[str]]]:
    """Each figure that both have."""
    for change in pair.changes:
        cells = [title_of(change.figure), _spread(change.figure, change.before), _spread(change.figure, change.after)]
        yield change, [*cells, told_change(change), _told_beyond(pair.beyond(change))]


def colour(pair: Pair, change: Change) -> str | None:
    """`better` or `worse`; None where that cannot be said, as runs differ as much among themselves."""
    if change.better is None or pair.beyond(change) is False:
        return None
    return "better" if change.better else "worse"


def told_change(change: Change) -> str:
    """In percent of what it was."""
    if change.before.median == change.after.median:
        return "same"
    return "from zero" if change.relative is None else f"{change.relative:+.1%}"


def _told_beyond(beyond: bool | None) -> str:
    return "no spread known" if beyond is None else "yes" if beyond else "no"


def _spread(name: str, spread: Spread) -> str:
    if spread.low == spread.high:
        return told_figure(name, spread.median)
    return f"{told_figure(name, spread.median)} ({told_figure(name, spread.low)} to {told_figure(name, spread.high)})"
