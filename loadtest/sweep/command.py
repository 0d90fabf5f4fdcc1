"""`loadtest sweep`: reads the plan, carries it out, ends with an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from loadtest.console import fail, say, say_written
from loadtest.drive.fleet import Stopped, StopSignals
from loadtest.report.formatting import number
from loadtest.sweep.plan import PlanError, SweepPlan, parse
from loadtest.sweep.report import outcome, show, write_report
from loadtest.sweep.run import Sweep
from loadtest.sweep.space import Space, space_of
from loadtest.sweep.store import Store
from loadtest.workloads.bodies import DatasetError
from loadtest.workloads.trace import TraceError


def sweep(
    file: Annotated[Path, typer.Argument(help="The plan, a YAML file.", exists=True, dir_okay=False, metavar="PLAN")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", file_okay=False, help="Folder of the results. Default: PLAN without .yaml."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be tried, and start nothing.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what failed.")] = False,
) -> None:
    """Try vLLM's settings one after another under the same load, and report which serves it best within the bounds.

    Run it again to go on where it was stopped: what is finished is not run again.

    Exit code 0: every workload has a configuration within the bounds. 1: one has none, or it was stopped. 2: usage,
    or the plan is wrong.
    """
    console = Console()
    try:
        plan = read_plan(file)
        for workload in plan.workloads:
            workload.options("http://127.0.0.1", 1.0, 0).check_files()
        space, folder = space_of(plan), out or file.with_suffix("")
        store = Store(folder, plan)
    except (PlanError, TraceError, DatasetError, OSError) as error:
        raise fail(f"{file}: {error}") from None
    _show_space(space, console)
    if dry_run:
        for configuration in space.configurations:
            say(console, f"to try: {configuration.label}")
        return
    if retry_failed:
        store.forget_failures()
    raise typer.Exit(0 if _carried_out(plan, space, store, console) else 1)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return node.value if ":" in node.value else loader.construct_yaml_int(node)


class _PlanLoader(yaml.SafeLoader):
    """YAML in which `2:6` is text and not a number to base 60, for ranges are written so."""

    yaml_constructors = yaml.SafeLoader.yaml_constructors | {"tag:yaml.org,2002:int": _whole_number}


def read_plan(file: Path) -> SweepPlan:
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), Loader=_PlanLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(str(error)) from None
    return parse(document)


def _carried_out(plan: SweepPlan, space: Space, store: Store, console: Console) -> bool:
    with StopSignals() as signals:
        under_way = Sweep(plan, space=space, store=store, console=console, should_stop=signals.asked)
        try:
            under_way.carry_out()
            finished = True
        except Stopped:
            finished = False
        store.folder.mkdir(parents=True, exist_ok=True)
        found = outcome(under_way, finished=finished)
        written = write_report(under_way, found)
    show(found, plan, console)
    say_written(console, written)
    if not finished:
        say(console, "stopped; the same command goes on from here", "red")
    return finished and len(found.winners) == len(plan.workloads)


def _show_space(space: Space, console: Console) -> None:
    many = len(space.configurations)
    say(console, f"{number(many)} configuration{'s' if many != 1 else ''} to try")
    for configuration, why in space.left_out:
        say(console, f"left out: {configuration.label}: {why}", "dim")
