"""The command: count, compare with the budget, and write a new one where it was earned."""

import json
from pathlib import Path
from typing import Annotated

import typer

from gateway import BUILD
from loadtest.compare.peers import NotInstalled
from loadtest.console import markdown_table
from tests.bench.install import build_counter
from tests.bench.instructions.count import ROWS, count
from tests.bench.place import Place

BUDGET = Path(__file__).with_name("budget.json")
TOLERANCE = 0.03


def instructions(
    names: Annotated[list[str] | None, typer.Argument(help="Workloads. None = all with a budget.")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where tools are kept.")] = Path(".bench"),
    write: Annotated[bool, typer.Option("--write", help="Make what was counted the budget.")] = False,
) -> None:
    """Count the instructions of requests, events and decisions; exit 1 if one grew by more than 3 % over its budget.

    Each build has its own budget; the build that runs is counted (`gateway --version` shows it).
    """
    budgets: dict[str, dict[str, int]] = json.loads(BUDGET.read_text())
    budget = budgets[BUILD]
    try:
        library = build_counter(Place(directory.resolve()))
    except NotInstalled as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    counted = count(library, names or [], lambda line: typer.echo(line, err=True))
    typer.echo(f"Build: {BUILD}\n\n{table(counted, budget)}")
    if write:
        earned = {row.name: counted[row.name] for row in ROWS if row.has_budget and row.name in counted}
        BUDGET.write_text(json.dumps(budgets | {BUILD: budget | earned}, indent=1) + "\n")
    elif grown := over_budget(counted, budget):
        typer.echo("\n".join(grown), err=True)
        raise typer.Exit(1)


def table(counted: dict[str, int], budget: dict[str, int]) -> str:
    """What was counted beside its budget, in Markdown."""
    titles = {row.name: row.title for row in ROWS}
    rows = []
    for name, figure in counted.items():
        most = budget.get(name)
        beside = (f"{most:,}", f"{figure / most:.3f}") if most else ("none", "")
        rows.append((f"{titles[name]} (`{name}`)", f"{figure:,}", *beside))
    return markdown_table(("instructions of", "counted", "budget", "ratio"), rows, texts=1)


def over_budget(counted: dict[str, int], budget: dict[str, int]) -> list[str]:
    """The figures that grew by more than the tolerance, or that have no budget."""
    spared = {row.name for row in ROWS if not row.has_budget}
    return [
        f"{name}: {figure:,} instructions, the budget is {budget[name]:,}: find what was added, or earn a new budget "
        "and write it with --write"
        if name in budget
        else f"{name}: {figure:,} instructions, and no budget: write it with --write"
        for name, figure in counted.items()
        if name not in spared and (name not in budget or figure > budget[name] * (1 + TOLERANCE))
    ]
