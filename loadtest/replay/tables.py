"""A grid's results as rows of text: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadtest.replay.results import GridResults
from loadtest.replay.summary import Figures
from loadtest.report.figure import milliseconds, number, percent

_Columns = tuple[tuple[str, Callable[[Figures], float], Callable[[float], str]], ...]
_COLUMNS: _Columns = (
    ("TTFT mean", lambda f: f.ttft.mean * 1e3, milliseconds),
    ("p50", lambda f: f.ttft.p50 * 1e3, milliseconds),
    ("p99", lambda f: f.ttft.p99 * 1e3, milliseconds),
    ("TPOT mean", lambda f: f.tpot.mean * 1e3, milliseconds),
    ("p99", lambda f: f.tpot.p99 * 1e3, milliseconds),
    ("E2E mean", lambda f: f.e2e.mean * 1e3, milliseconds),
    ("p99", lambda f: f.e2e.p99 * 1e3, milliseconds),
    ("SLO missed", lambda f: f.violations, percent),
    ("goodput", lambda f: f.goodput, percent),
    ("hit", lambda f: f.hit_ratio, percent),
    ("max/mean prefill", lambda f: f.prefill_imbalance, lambda value: f"{value:.2f}"),
)
_ADMISSION: _Columns = (
    ("preempted", lambda f: float(f.preemptions), number),
    ("recomputed", lambda f: float(f.recomputed_tokens), number),
    ("running", lambda f: f.mean_running, lambda value: f"{value:.1f}"),
    ("most waiting", lambda f: float(f.most_waiting), number),
    ("waited p99", lambda f: f.waited_p99_seconds * 1e3, milliseconds),
    ("TTFT p99", lambda f: f.ttft.p99 * 1e3, milliseconds),
    ("TPOT p99", lambda f: f.tpot.p99 * 1e3, milliseconds),
    ("goodput", lambda f: f.goodput, percent),
    ("good/s", lambda f: f.goodput_per_second, lambda value: f"{value:.2f}"),
    ("tokens/s", lambda f: f.output_tokens_per_second, number),
)
FIGURES_HEAD = ("policy", *(name for name, _, _ in _COLUMNS))
ADMISSION_HEAD = ("policy", *(name for name, _, _ in _ADMISSION))
RATIOS_HEAD = ("policy", "TTFT", "p50", "p99", "TPOT", "p99", "E2E", "SLO missed")


def figure_rows(results: GridResults, engines: int, load: float) -> list[list[str]]:
    """A row for each policy, means over the seeds."""
    return _rows(results, engines, load, _COLUMNS)


def admission_rows(results: GridResults, engines: int, load: float) -> list[list[str]]:
    """The same, of what the engines' memory and batches came to."""
    return _rows(results, engines, load, _ADMISSION)


def _rows(results: GridResults, engines: int, load: float, columns: _Columns) -> list[list[str]]:
    rows = []
    for policy in results.policies:
        values = [results.mean(engines, load, policy, figure) for _, figure, _ in columns]
        if values[0] is not None:
            shown = [write(value) for value, (_, _, write) in zip(values, columns, strict=True) if value is not None]
            rows.append([policy, *shown])
    return rows


def ratio_rows(results: GridResults) -> list[list[str]]:
    """A row for each policy: geometric means against the baseline."""
    rows = []
    for policy in results.policies:
        found = results.ratios(policy)
        if found is not None:
            values = (
                found.ttft, found.ttft_p50, found.ttft_p99, found.tpot, found.tpot_p99, found.e2e, found.violations,
            )  # fmt: skip
            rows.append([policy, *(f"{value:.3f}" for value in values)])
    return rows


def title(results: GridResults, engines: int, load: float) -> str:
    """What a table of figures is of."""
    rate = load * results.capacities[engines]
    return f"{results.trace.name}: {engines} engines, load {load:g} ({rate:.2f} requests/s)"


def terminal_tables(results: GridResults) -> list[Table]:
    """A table for each fleet and load, and one of ratios."""
    tables = []
    for engines in results.fleets:
        for load in results.loads:
            if rows := figure_rows(results, engines, load):
                tables.append(_table(title(results, engines, load), FIGURES_HEAD, rows))
                tables.append(
                    _table("KV cache, batches and lines", ADMISSION_HEAD, admission_rows(results, engines, load))
                )
    rows = ratio_rows(results)
    if rows:
        tables.append(
            _table(f"Against {results.baseline}: geometric mean of ratios (below 1 is better)", RATIOS_HEAD, rows)
        )
    return tables


def _table(name: str, head: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    for column in head:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
