"""The tables of a comparison as cells of text: medians with their intervals by arm, ties, and ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import combinations

from loadtest.compare.outage import report
from loadtest.compare.outage.schema import Fault
from loadtest.compare.peers import OURS
from loadtest.compare.schema import DIRECT, ArmFigures, ArmRun, Comparison
from loadtest.report.formatting import margin, milliseconds, number, percent, reach
from loadtest.report.series import Spread, spread_of
from loadtest.report.statistics import FEWEST, mann_whitney, significant


@dataclass(frozen=True)
class Column:
    """One figure of a turn; None where a turn has none."""

    title: str
    value: Callable[[ArmRun], float | None]
    shown: Callable[[float], str]
    _: KW_ONLY
    higher_is_better: bool | None = False
    """None: a count of events, without a winner."""


def _of(name: str) -> Callable[[ArmRun], float | None]:
    def value(turn: ArmRun) -> float | None:
        found: float | None = getattr(turn.figures, name) if turn.figures else None
        return found

    return value


def _errors(turn: ArmRun) -> float | None:
    figures = turn.figures
    return sum(figures.failed.values()) / max(figures.requests, 1) if figures else None


def _peak(turn: ArmRun) -> float | None:
    known = [value for value in (turn.figures.peak_running if turn.figures else []) if value is not None]
    return max(known, default=None)


def _added(name: str) -> Callable[[ArmRun], float | None]:
    def value(turn: ArmRun) -> float | None:
        found: float | None = getattr(turn.overhead.added, name) if turn.overhead.added else None
        return found

    return value


def _cpu(name: str) -> Callable[[ArmRun], float | None]:
    """Measured by itself where it was, else under the workload."""

    def value(turn: ArmRun) -> float | None:
        alone: float | None = getattr(turn.overhead, name)
        return alone if alone is not None else _of(name)(turn)

    return value


def _signed_ms(value: float) -> str:
    return ("+" if value >= 0 else "-") + milliseconds(abs(value))


def _us(value: float) -> str:
    return f"{number(value)} µs"


def _mib(value: float) -> str:
    return f"{value:.0f} MiB"


QUALITY = (
    Column("hit rate", _of("hit_ratio"), percent, higher_is_better=True),
    Column("TTFT p50", _of("ttft_p50"), milliseconds),
    Column("TTFT p99", _of("ttft_p99"), milliseconds),
    Column("output tokens/s", _of("output_tokens_per_second"), number, higher_is_better=True),
    Column("in SLO", _of("attainment"), percent, higher_is_better=True),
    Column("failed", _errors, percent),
)
DETAILS = (
    Column("TPOT p50", _of("tpot_p50"), milliseconds),
    Column("E2E p50", _of("e2e_p50"), milliseconds),
    Column("E2E p99", _of("e2e_p99"), milliseconds),
    Column("least used engine", _of("least_share"), percent, higher_is_better=None),
    Column("most sequences at once", _peak, number, higher_is_better=None),
    Column("preemptions", _of("preemptions"), number),
)
DIFFERENCES = (
    Column("added latency p50", _added("p50"), _signed_ms),
    Column("added latency p99", _added("p99"), _signed_ms),
)
COST = (
    *DIFFERENCES,
    Column("CPU a request", _cpu("cpu_us_per_request"), _us),
    Column("CPU a streamed event", _cpu("cpu_us_per_event"), _us),
    Column("memory", _of("memory_mib"), _mib),
)


# A figure that may be about zero, or is a share, has no percentage of itself.
_NEAR = {*DIFFERENCES, *(column for column in (*QUALITY, *DETAILS) if column.shown is percent)}


def measured_arms(comparison: Comparison) -> list[str]:
    """The arms that have figures, in the order of the tables."""
    return [arm.name for arm in comparison.arms if comparison.turns_of(arm.name)]


def cell(turns: Sequence[ArmRun], column: Column) -> Spread | None:
    """None where no turn has the figure."""
    return spread_of([column.value(turn) for turn in turns])


def cell_text(found: Spread | None, shown: Callable[[float], str], *, near: bool = False) -> str:
    """The median, and behind it how far its 95 % confidence interval reaches: in percent, or in its own unit.

    `near`: of a figure that may be about zero or is a share, which has no percentage.
    """
    if found is None:
        return "-"
    interval = found.interval
    if near and interval is not None and interval[0] < interval[1]:
        away = shown(reach(found.median, interval)).lstrip("+")
        return f"{shown(found.median)} ±{away.replace('%', ' pp')}"
    return shown(found.median) + margin(abs(found.median), interval)


def columns_of(comparison: Comparison, columns: Sequence[Column]) -> list[Column]:
    """Those with figures, and in which anything happened."""
    cells = {
        column: [found for arm in measured_arms(comparison) if (found := cell(comparison.turns_of(arm), column))]
        for column in columns
    }
    silent = {"failed", "preemptions"}
    return [
        column
        for column, found in cells.items()
        if found and (column.title not in silent or any(one.high for one in found))
    ]


def best(comparison: Comparison, column: Column) -> str | None:
    """The arm with the best median; None where there is no winner. An engine without a proxy does not compete."""
    if column.higher_is_better is None:
        return None
    cells = _competing(comparison, column)
    if len(cells) < 2:
        return None
    pick = max if column.higher_is_better else min
    ahead = pick(found.median for found in cells.values())
    first = [arm for arm, found in cells.items() if found.median == ahead]
    return first[0] if len(first) == 1 else None


def ties(comparison: Comparison, columns: Sequence[Column]) -> dict[Column, list[str]]:
    """The arms without a significant difference to a column's best. All pairs are tested together."""
    ahead = {column: first for column in columns if (first := best(comparison, column)) is not None}
    values = {column: {arm: found.values for arm, found in _competing(comparison, column).items()} for column in ahead}
    p_values = {
        (column, frozenset(pair)): mann_whitney(*(arms[arm] for arm in pair))
        for column, arms in values.items()
        for pair in combinations(arms, 2)
    }
    apart = significant(p_values)
    return {
        column: [arm for arm in values[column] if arm != first and (column, frozenset((first, arm))) not in apart]
        for column, first in ahead.items()
    }


def can_separate(comparison: Comparison) -> bool:
    """Whether there are repetitions enough for any difference to be significant."""
    return max((len(comparison.turns_of(arm)) for arm in measured_arms(comparison)), default=0) >= FEWEST


def _competing(comparison: Comparison, column: Column) -> dict[str, Spread]:
    arms = [arm for arm in measured_arms(comparison) if arm != DIRECT]
    return {arm: found for arm in arms if (found := cell(comparison.turns_of(arm), column))}


def ratio(comparison: Comparison, other: str, column: Column) -> Spread | None:
    """Ours over the other's, repetition by repetition."""
    ours = {turn.repetition: column.value(turn) for turn in comparison.turns_of(OURS)}
    ratios = []
    for turn in comparison.turns_of(other):
        mine, its = ours.get(turn.repetition), column.value(turn)
        if mine is not None and its is not None and mine >= 0 and its > 0:
            ratios.append(mine / its)
    return spread_of(ratios)


def has_figures(turns: Sequence[ArmRun]) -> list[ArmFigures]:
    return [turn.figures for turn in turns if turn.figures is not None]


_OF = "ours / theirs"


@dataclass(frozen=True)
class Table:
    """Rows of cells, and which of them are the best of their column."""

    title: str
    head: list[str]
    rows: list[list[str]]
    _: KW_ONLY
    best: frozenset[tuple[int, int]] = frozenset()
    """(row, column) of the cells that are ahead."""


def tables(comparison: Comparison, *, compact: bool = False) -> list[Table]:
    """What is found under the workload, ours against the others, more of it, and cost; those with something to show."""
    quality, details, cost = (columns_of(comparison, columns) for columns in (QUALITY, DETAILS, COST))
    made = [_medians("Under the workload", comparison, quality)]
    if OURS in measured_arms(comparison) and len(measured_arms(comparison)) > 1:
        made.append(_ratios(comparison, [*quality, *details, *cost]))
    made += [_medians(title, comparison, shown) for title, shown in (("More of it", details), ("Cost", cost))]
    return [table for table in (*made, *_away(comparison, compact)) if table.rows and len(table.head) > 1]


def _away(comparison: Comparison, compact: bool) -> list[Table]:
    """The outcomes of requests while an engine was away; compact: a proxy is a column, as there are more figures."""
    killed = comparison.killed
    if killed is None:
        return []
    labels = {arm.name: f"{arm.name} {arm.version}".strip() for arm in comparison.arms}
    made = []
    for fault in Fault:
        if rows := report.rows(killed, fault, labels):
            lines = [report.HEAD, *rows]
            head, *others = map(list, zip(*lines, strict=True)) if compact else lines
            made.append(Table(report.TITLES[fault], head, others))
    return made


def _medians(title: str, comparison: Comparison, columns: Sequence[Column]) -> Table:
    arms = {arm.name: arm for arm in comparison.arms if arm.name in measured_arms(comparison)}
    leading = [best(comparison, column) for column in columns]
    tied = ties(comparison, columns) if can_separate(comparison) else {}
    rows: list[list[str]] = []
    ahead: set[tuple[int, int]] = set()
    for name, arm in arms.items():
        cells = []
        for column, leader in zip(columns, leading, strict=True):
            text = cell_text(cell(comparison.turns_of(name), column), column.shown, near=column in _NEAR)
            its = tied.get(column, [])
            cells.append(f"{text}, tie" if its and name in (leader, *its) else text)
        if any(one != "-" for one in cells):
            ahead |= {(len(rows), at + 1) for at, leader in enumerate(leading) if leader == name}
            rows.append([f"{name} {arm.version}".strip(), *cells])
    return Table(title, ["proxy", *(column.title for column in columns)], rows, best=frozenset(ahead))


def _ratios(comparison: Comparison, columns: Sequence[Column]) -> Table:
    """Differences of latency have no ratio, and neither have columns without a winner."""
    shown = [column for column in columns if column.higher_is_better is not None and column not in DIFFERENCES]
    others = [arm for arm in measured_arms(comparison) if arm not in (OURS, DIRECT)]
    cells = [[_ratio_text(ratio(comparison, other, column)) for column in shown] for other in others]
    kept = [at for at in range(len(shown)) if any(row[at] != "-" for row in cells)]
    rows = [[other, *(row[at] for at in kept)] for other, row in zip(others, cells, strict=True)]
    return Table("Ours over theirs, repetition by repetition", [_OF, *(_directed(shown[at]) for at in kept)], rows)


def _ratio_text(found: Spread | None) -> str:
    interval = found.interval if found is not None else None
    is_tie = interval is not None and interval[0] <= 1 <= interval[1]
    return cell_text(found, _times, near=True) + (", tie" if is_tie else "")


def _times(value: float) -> str:
    return f"{value:.2f}"


def _directed(column: Column) -> str:
    return f"{column.title} {'↑' if column.higher_is_better else '↓'}"


def winners(comparison: Comparison) -> list[str]:
    """The arm with the best median of each column and its ties; before them, whether any can win."""
    shown = columns_of(comparison, (*QUALITY, *DETAILS, *COST))
    enough = can_separate(comparison)
    lines = []
    for column, tied in ties(comparison, shown).items():
        note = f" (ties with: {', '.join(tied)})" if tied and enough else ""
        lines.append(f"{column.title}: {best(comparison, column)}{note}")
    if lines and not enough:
        lines.insert(0, f"too few repetitions to separate proxies (--repeat {FEWEST} or more can)")
    return lines
