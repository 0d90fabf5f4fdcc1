"""Tells and writes what a sweep came to: tables, sweep.json, a page in Markdown, pictures, vLLM's own layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.report.figure import milliseconds, number
from loadtest.report.inference import FEWEST
from loadtest.sweep.judge import LATENCIES, told_name
from loadtest.sweep.outcome import Entry, Outcome, Winner
from loadtest.sweep.picture import pareto
from loadtest.sweep.plan import Plan, Way
from loadtest.sweep.run import Sweep
from loadtest.sweep.vllm_layout import write_vllm_layout

_LOG_LINES = 8


def write_report(sweep: Sweep, found: Outcome) -> list[Path]:
    """Writes into the sweep's folder what all runs together say."""
    folder = sweep.store.folder
    figures, page = folder / "sweep.json", folder / "report.md"
    figures.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    pictures: dict[str, str] = {}
    for workload in sweep.plan.workloads:
        entries = found.of(workload.name, sweep.plan.through[0])
        drawn = pareto([entry for entry in entries if entry.share == 1], sweep.plan.objective)
        if drawn is not None:
            pictures[workload.name] = f"pareto-{workload.name}.svg"
            (folder / pictures[workload.name]).write_text(drawn, encoding="utf-8")
    page.write_text(markdown(found, sweep.plan, pictures), encoding="utf-8")
    write_vllm_layout(sweep, folder / "vllm")
    return [figures, page, *(folder / name for name in pictures.values()), folder / "vllm"]


def show(found: Outcome, plan: Plan, console: Console) -> None:
    """A table for each workload and way, then the winners."""
    for workload in plan.workloads:
        for way in plan.through:
            entries = found.of(workload.name, way)
            if not entries:
                continue
            table = Table(title=_title(workload.name, way), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
            for place, name in enumerate(_head(plan)):
                table.add_column(name, justify="right" if 0 < place < len(_head(plan)) - 1 else "left", overflow="fold")
            for entry in entries:
                style = None if entry.fits else "dim" if entry.value is not None else "red"
                table.add_row(*map(Text, _row(entry, plan)), style=style)
            console.print(table)
    for line in winner_lines(found, plan):
        console.print(line, style="bold", markup=False, highlight=False, soft_wrap=True)


def winner_lines(found: Outcome, plan: Plan) -> list[str]:
    """One for each workload, and how its server is started."""
    lines = []
    for workload in plan.workloads:
        won = next((one for one in found.winners if one.workload == workload.name), None)
        if won is None:
            why = "no configuration keeps within the bounds" if found.finished else "not finished"
            lines.append(f"{workload.name}: {why}")
        else:
            told = f"{number(won.value)} {told_name(plan.objective.maximise.value)}"
            lines.append(f"{workload.name}: {won.label}, {told}\n  {won.command}")
            if won.tied:
                lines.append(f"  {_unsure(won)}")
    return lines


def _unsure(won: Winner) -> str:
    """Why it is no clear winner."""
    if won.runs >= FEWEST:
        return f"no clear winner: it ties with {', '.join(won.tied)}"
    runs = "1 run" if won.runs == 1 else f"{won.runs} runs"
    return f"no clear winner: {runs} of each cannot tell configurations apart, repeat: {FEWEST} or more can"


def markdown(found: Outcome, plan: Plan, pictures: dict[str, str]) -> str:
    bounds = [f"{told_name(name)} at most {bound:g} s" for name, bound in plan.objective.bounds.items()]
    aim = f"Most {told_name(plan.objective.maximise.value)}{' with ' if bounds else ''}{' and '.join(bounds)}."
    parts = ["# Sweep", aim]
    if not found.finished:
        parts.append("It was stopped before its end.")
    for workload in plan.workloads:
        parts.append(f"## {workload.name}")
        won = next((one for one in found.winners if one.workload == workload.name), None)
        parts += _won(won) if won else ["No winner."]
        if workload.name in pictures:
            parts.append(f"![Pareto picture]({pictures[workload.name]})")
        for way in plan.through:
            if entries := found.of(workload.name, way):
                rows = [_row(entry, plan) for entry in entries]
                parts += [_title(workload.name, way), _table(_head(plan), rows)]
    if found.left_out:
        rows = [[label, why] for label, why in found.left_out.items()]
        parts += ["## Not tried", _table(["configuration", "why"], rows)]
    failed = {entry.label: entry for entry in found.entries if entry.log}
    if failed:
        parts.append("## Failed")
        for label, entry in failed.items():
            log = "\n".join(entry.log[-_LOG_LINES:])
            parts.append(f"`{label}`: {'; '.join(entry.complaints)}\n\n```\n{log}\n```")
    return "\n\n".join(parts) + "\n"


def _won(won: Winner) -> list[str]:
    told = f"Best median: `{won.label}`; {_unsure(won)}." if won.tied else f"Winner: `{won.label}`"
    return [told, f"```sh\n{won.command}\n```"]


def _title(workload: str, way: Way) -> str:
    return f"{workload}, {'direct' if way == 'direct' else 'through the gateway'}"


def _head(plan: Plan) -> list[str]:
    return ["configuration", told_name(plan.objective.maximise.value), *map(told_name, LATENCIES), "runs", ""]


def _row(entry: Entry, plan: Plan) -> list[str]:
    cells = [entry.label, number(entry.figures.get(plan.objective.maximise.value))]
    for name in LATENCIES:
        seconds = entry.figures.get(name)
        cells.append(milliseconds(None if seconds is None else seconds * 1e3))
    runs = f"{entry.runs}" if entry.share == 1 else f"{entry.runs} of {entry.share:.0%}"
    return [*cells, runs, "; ".join(entry.complaints)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
