"""A diff as rows of text: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator

from loadtest.report.diff import Change, Diff, Pair
from loadtest.report.series_tables import title_of, told_spread

MADE_HEAD = ("", "before", "after")
FIGURES_HEAD = ("", "before", "after", "change", "significant")


def made_rows(found: Diff) -> list[list[str]]:
    """How the two were made, where that differs."""
    return [list(row) for row in found.made]


def figure_rows(pair: Pair) -> Iterator[tuple[Change, list[str]]]:
    for change in pair.changes:
        figures = [told_spread(change.figure, spread) for spread in (change.before, change.after)]
        yield change, [title_of(change.figure), *figures, told_change(change), change.significance]


def colour(change: Change) -> str | None:
    """`better` or `worse`; None where that cannot be said."""
    return None if change.better is None else "better" if change.better else "worse"


def told_change(change: Change) -> str:
    """In percent of what it was."""
    if change.before.median == change.after.median:
        return "same"
    return "from zero" if change.relative is None else f"{change.relative:+.1%}"
