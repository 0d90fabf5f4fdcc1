"""Whether the gateway loses: `ours` against the best of the other routers, cell by cell and over all traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from rich.table import Table

from loadtest.console import plain_table
from loadtest.replay.gateway_router import parted
from loadtest.replay.grid import GridResults
from loadtest.replay.policies import OWN
from loadtest.replay.summary import PolicyFigures, ratios
from loadtest.report.formatting import milliseconds, percent

_JUDGED = "ours"
_WORSE = 0.02  # share of the best rival's figure; less is noise
_HIGH_LOAD = 0.95
_CELLS_HEAD = ("trace", "engines", "load", "E2E", "best other", "ratio", "goodput", "best other", "ratio", "verdict")


@dataclass(frozen=True, slots=True)
class FigureVerdict:
    """One figure of one cell: that of `ours`, and the best of the rivals with its name."""

    ours: float
    best: float
    rival: str

    @property
    def ratio(self) -> float:
        return self.ours / self.best if self.best else 1.0


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """Mean E2E and goodput of one fleet at one load."""

    trace: str
    engines: int
    load: float
    _: KW_ONLY
    e2e: FigureVerdict
    goodput: FigureVerdict

    @property
    def losses(self) -> list[str]:
        """The figures in which a rival is clearly better."""
        e2e = ["E2E"] if self.e2e.ratio > 1 + _WORSE else []
        return e2e + (["goodput"] if self.goodput.ratio < 1 - _WORSE else [])


def cells_of(results: GridResults) -> list[CellVerdict]:
    """Every cell, if `ours` and rivals were replayed."""
    rivals = [policy for policy in results.policies if parted(policy)[0] not in OWN]
    if _JUDGED not in results.policies or not rivals:
        return []

    def judged(engines: int, load: float, figure: Callable[[PolicyFigures], float], sign: int) -> FigureVerdict:
        def of(policy: str) -> float:
            return results.mean(engines, load, policy, figure) or 0.0

        rival = max(rivals, key=lambda policy: sign * of(policy))
        return FigureVerdict(of(_JUDGED), of(rival), rival)

    return [
        CellVerdict(
            results.trace.name,
            engines,
            load,
            e2e=judged(engines, load, lambda figures: figures.e2e.mean, -1),
            goodput=judged(engines, load, lambda figures: figures.goodput, 1),
        )
        for engines in results.fleets
        for load in results.loads
    ]


def verdict_tables(grids: Sequence[GridResults]) -> list[Table]:
    """The cells of all grids, and a line for each trace and for all of them."""
    judged = [(grid, cells) for grid in grids if (cells := cells_of(grid))]
    if not judged:
        return []
    base = judged[0][0].baseline
    head = ("trace", "cells", "lost", f"TTFT p99 to {base}", "E2E p99", "E2E mean", f"E2E mean, load >= {_HIGH_LOAD}")
    lines = [_line(grid.trace.name, [grid], cells) for grid, cells in judged]
    if len(judged) > 1:
        lines.append(_line("all", [grid for grid, _ in judged], [cell for _, cells in judged for cell in cells]))
    return [
        plain_table(
            "Ours against the best other policy", _CELLS_HEAD, [_row(cell) for _, cells in judged for cell in cells]
        ),
        plain_table("Verdict: geometric means of ratios (below 1 is better)", head, lines),
    ]


def _row(cell: CellVerdict) -> list[str]:
    def shown(found: FigureVerdict, written: Callable[[float], str]) -> list[str]:
        return [written(found.ours), f"{written(found.best)} {found.rival}", f"{found.ratio:.3f}"]

    e2e = shown(cell.e2e, lambda seconds: milliseconds(seconds * 1e3))
    verdict = ", ".join(cell.losses)
    name = [cell.trace, str(cell.engines), f"{cell.load:g}"]
    return [*name, *e2e, *shown(cell.goodput, percent), f"worse {verdict}" if verdict else "ok"]


def _line(name: str, grids: Sequence[GridResults], cells: Sequence[CellVerdict]) -> list[str]:
    pairs = [pair for grid in grids for pair in grid.pairs(_JUDGED)]
    high = [pair for grid in grids for pair in grid.pairs(_JUDGED, _HIGH_LOAD)]
    lost = sum(bool(cell.losses) for cell in cells)
    found = ratios(pairs)
    means = (found.ttft_p99, found.e2e_p99, found.e2e) if pairs else ()
    values = [*means, *([ratios(high).e2e] if high else [])]
    return [name, str(len(cells)), str(lost), *(f"{value:.3f}" for value in values)]
