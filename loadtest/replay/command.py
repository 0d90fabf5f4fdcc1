"""`loadtest replay`: reads the options, replays the grid, and writes tables, figures and a picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.console import command_line, fail
from loadtest.replay.grid import CellOutcome, GridCell, GridResults, Kept, Workers, kept_in
from loadtest.replay.options import ReplayOptions
from loadtest.replay.report import knee, page, terminal_tables
from loadtest.replay.scenario import Scenario
from loadtest.replay.verdict import verdict_tables
from loadtest.workloads.regimes import trace_from
from loadtest.workloads.trace import Trace, TraceError

_WIDEST = 200


def replay(options: ReplayOptions) -> None:
    """Replay traces through the gateway's own placement, and through other routers' rules.

    Engines are modelled and time is virtual; nothing listens, nothing is sent. Exit code 2: usage, or a bad trace.
    """
    complaints, console = Console(stderr=True), Console()
    if not console.is_terminal:
        console = Console(width=_WIDEST)
    try:
        fleets, loads, names = options.fleets(), options.loads(), options.arms()
        traces = [trace_from(source, options.block_size, options.limit, options.minutes) for source in options.traces]
        _check(traces, fleets[0])
    except (ValueError, TraceError) as error:
        raise fail(error) from None
    grids = []
    for trace in traces:
        with Workers(trace, options.jobs) as workers, _progress(complaints) as progress:
            capacities = _capacities(trace, fleets, options.capacity, workers=workers, progress=progress)
            outcomes, seconds = _replayed(
                _cells(fleets, capacities, loads, seeds=options.seeds, policies=names), workers, progress
            )
        grids.append(GridResults(trace, options.baseline, capacities, outcomes=outcomes, command=command_line()))
        _show(terminal_tables(grids[-1]), console)
        complaints.print(_pace(outcomes, seconds))
        if options.out is not None:
            _write(grids[-1], options.out if len(traces) == 1 else options.out / trace.name, complaints)
    _show(verdict_tables(grids), console)


def _cells(
    fleets: Sequence[Scenario],
    capacities: dict[int, float],
    loads: Sequence[float],
    seeds: int,
    policies: Sequence[str],
) -> list[GridCell]:
    return [
        GridCell(share, replace(fleet, rate_per_second=share * capacities[fleet.engines], seed=seed), name)
        for fleet in fleets
        for share in loads
        for seed in range(seeds)
        for name in policies
    ]


def _check(traces: Sequence[Trace], scenario: Scenario) -> None:
    """Whether every request fits into an engine, and every trace has a name of its own. Raises ValueError."""
    for trace in traces:
        limits = scenario.limits(trace.block_tokens)
        longest = max(row.prompt_tokens + scenario.lengths.output_tokens(row.output_tokens) for row in trace.rows)
        if longest > limits.num_blocks * trace.block_tokens:
            raise ValueError(f"--kv-tokens: the longest request of {trace.name} has {longest} tokens")
    names = [trace.name for trace in traces]
    if len(set(names)) < len(names):
        raise ValueError(f"two traces have the same name: {', '.join(names)}")


def _capacities(
    trace: Trace, scenarios: Sequence[Scenario], each: float | None, workers: Workers, progress: Progress
) -> dict[int, float]:
    """Requests per second of each fleet: `each` engine's, if that is given."""
    if each is not None:
        return {scenario.engines: each * scenario.engines for scenario in scenarios}
    kept = Kept(kept_in())
    found = {scenario.engines: rate for scenario in scenarios if (rate := kept.get(trace, scenario)) is not None}
    wanted = [scenario for scenario in scenarios if scenario.engines not in found]
    if wanted:
        task = progress.add_task("capacity", total=len(wanted))
        for scenario, rate in zip(wanted, workers.capacities(wanted), strict=True):
            kept.put(trace, scenario, rate)
            found[scenario.engines] = rate
            progress.advance(task)
    return dict(sorted(found.items()))


def _replayed(cells: Sequence[GridCell], workers: Workers, progress: Progress) -> tuple[list[CellOutcome], float]:
    """What the cells came to, and how many seconds it took."""
    began = time.monotonic()
    task = progress.add_task("replays", total=len(cells))
    found: dict[GridCell, CellOutcome] = {}
    for outcome in workers.outcomes(cells):
        found[outcome.cell] = outcome
        progress.advance(task)
    return [found[cell] for cell in cells], time.monotonic() - began


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _pace(outcomes: Sequence[CellOutcome], seconds: float) -> str:
    requests = sum(outcome.figures.requests for outcome in outcomes)
    cpu_seconds = sum(outcome.figures.cpu_seconds for outcome in outcomes)
    pace = f"{requests / seconds:,.0f} requests per second, {requests / cpu_seconds:,.0f} per second of CPU"
    return f"{len(outcomes)} replays in {seconds:.1f} s: {pace}"


def _show(tables: Sequence[Table], console: Console) -> None:
    for table in tables:
        console.print(table)


def _write(results: GridResults, out: Path, complaints: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = orjson.dumps(results.document(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    (out / "results.json").write_bytes(document)
    (out / "report.html").write_text(page(results), encoding="utf-8")
    if curve := knee(results):
        (out / "knee.svg").write_text(curve, encoding="utf-8")
    complaints.print(f"wrote {out / 'results.json'} and {out / 'report.html'}")
