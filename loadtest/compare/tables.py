"""The tables of a comparison, as cells of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.compare import killed_tables
from loadtest.compare.columns import (
    COST,
    DETAILS,
    DIFFERENCES,
    QUALITY,
    Column,
    best,
    cell,
    columns_of,
    measured_arms,
    ratio,
    ties,
    told,
)
from loadtest.compare.killed_schema import Fault
from loadtest.compare.ours import OURS
from loadtest.compare.schema import DIRECT, Comparison
from loadtest.report.inference import FEWEST

_OF = "ours / theirs"


@dataclass(frozen=True)
class Table:
    """Rows of cells, and which of them are the best of their column."""

    title: str
    head: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()
    """(row, column) of the cells that are ahead."""


def tables(comparison: Comparison, *, compact: bool = False) -> list[Table]:
    """What is found under the workload, ours against the others, more of it, and cost; those with something to show."""
    quality, details, cost = (columns_of(comparison, columns) for columns in (QUALITY, DETAILS, COST))
    made = [_medians("Under the workload", comparison, quality, compact)]
    if OURS in measured_arms(comparison) and len(measured_arms(comparison)) > 1:
        made.append(_ratios(comparison, [*quality, *details, *cost], compact))
    made += [_medians(title, comparison, shown, compact) for title, shown in (("More of it", details), ("Cost", cost))]
    return [table for table in (*made, *_away(comparison, compact)) if table.rows and len(table.head) > 1]


def _away(comparison: Comparison, compact: bool) -> list[Table]:
    """What became of requests while an engine was away; compact: a proxy is a column, as there are more figures."""
    killed = comparison.killed
    if killed is None:
        return []
    labels = {arm.name: f"{arm.name} {arm.version}".strip() for arm in comparison.arms}
    made = []
    for fault in Fault:
        if rows := killed_tables.rows(killed, fault, labels):
            lines = [killed_tables.HEAD, *rows]
            head, *others = map(list, zip(*lines, strict=True)) if compact else lines
            made.append(Table(killed_tables.TITLES[fault], head, others))
    return made


def _medians(title: str, comparison: Comparison, columns: Sequence[Column], compact: bool) -> Table:
    arms = {arm.name: arm for arm in comparison.arms if arm.name in measured_arms(comparison)}
    leading = [best(comparison, column) for column in columns]
    rows: list[list[str]] = []
    ahead: set[tuple[int, int]] = set()
    for name, arm in arms.items():
        cells = [told(cell(comparison.turns_of(name), column), column.shown, compact=compact) for column in columns]
        if any(one != "-" for one in cells):
            ahead |= {(len(rows), at + 1) for at, leader in enumerate(leading) if leader == name}
            rows.append([f"{name} {arm.version}".strip(), *cells])
    return Table(title, ["proxy", *(column.title for column in columns)], rows, frozenset(ahead))


def _ratios(comparison: Comparison, columns: Sequence[Column], compact: bool) -> Table:
    """Differences of latency have no ratio, and neither has what nobody wins."""
    shown = [column for column in columns if column.higher_is_better is not None and column not in DIFFERENCES]
    others = [arm for arm in measured_arms(comparison) if arm not in (OURS, DIRECT)]
    cells = [[told(ratio(comparison, other, column), _times, compact=compact) for column in shown] for other in others]
    kept = [at for at in range(len(shown)) if any(row[at] != "-" for row in cells)]
    rows = [[other, *(row[at] for at in kept)] for other, row in zip(others, cells, strict=True)]
    return Table("Ours over theirs, repetition by repetition", [_OF, *(_directed(shown[at]) for at in kept)], rows)


def _times(value: float) -> str:
    return f"{value:.2f}"


def _directed(column: Column) -> str:
    return f"{column.title} {'↑' if column.higher_is_better else '↓'}"


def winners(comparison: Comparison) -> list[str]:
    """The arm with the best median of each column and those that tie with it; before them, whether any can win."""
    shown = columns_of(comparison, (*QUALITY, *DETAILS, *COST))
    enough = max((len(comparison.turns_of(arm)) for arm in measured_arms(comparison)), default=0) >= FEWEST
    lines = []
    for column, tied in ties(comparison, shown).items():
        note = f" (ties with: {', '.join(tied)})" if tied and enough else ""
        lines.append(f"{column.title}: {best(comparison, column)}{note}")
    if lines and not enough:
        lines.insert(0, f"too few repetitions to tell proxies apart (--repeat {FEWEST} or more can)")
    return lines
