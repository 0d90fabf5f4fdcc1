"""`loadtest compare`: reads the options, carries the comparison out, ends with an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from loadtest.compare.options import CompareOptions, Killing
from loadtest.compare.outage import report
from loadtest.compare.page import comparison_page
from loadtest.compare.peers import OURS, PEERS, NotInstalled, arm_info, arms_of, named, ours, pip_install
from loadtest.compare.report import markdown, notes, picture
from loadtest.compare.run import compare
from loadtest.compare.schema import Comparison
from loadtest.compare.tables import tables, winners
from loadtest.console import complaints_of, fail, say, say_written
from loadtest.drive.options import RunOptions
from loadtest.drive.target import TargetError
from loadtest.servers.server import ServerFailed
from loadtest.workloads.bodies import DatasetError
from loadtest.workloads.trace import TraceError

_OUT = Path("compare")
_ANYWHERE = "http://compared"


def compare_command(options: CompareOptions, **given: Any) -> None:
    """Compare the gateway with other proxies: what they cost, what they make of the engines' prefix caches,
    and what becomes of requests when an engine goes.

    Exit code 0: fine, whoever is ahead. 1: the gateway failed, or the client was the limit. 2: usage.
    """
    console = Console()
    if options.install:
        _install(options)
    if options.list_:
        console.print(_listing(options.peers))
    if options.install or options.list_:
        return
    run = _of_run({**given, **_own_load(options, given)})
    peers = {**PEERS, OURS: ours(options.gateway_config)}
    try:
        run.check_files()
        arms = arms_of(options.arms or [], peers, options.peers, len(options.backend_urls) or options.engines)
    except (ValueError, TraceError, DatasetError) as error:
        raise typer.BadParameter(str(error)) from None
    for arm in arms:
        if arm.missing:
            say(console, f"leaving out {arm.name}: {arm.missing}")
    try:
        comparison = compare(options, run, arms=arms, peers=peers, out=run.out or _OUT, console=console)
    except (TargetError, ServerFailed, TimeoutError, OSError) as error:
        raise fail(error, 1) from None
    show(comparison, console)
    written = write_comparison(comparison, run.out or _OUT)
    say_written(console, written)
    raise typer.Exit(0 if comparison.passed else 1)


def _own_load(options: CompareOptions, given: dict[str, Any]) -> dict[str, Any]:
    """Where nothing but the load of engines that go is sent, no other load is required."""
    if options.killed is not Killing.ONLY or any(given.get(name) for name in ("concurrency", "rate", "trace")):
        return {}
    load = options.killed_load
    return {"rate": f"{load.rate_per_second:g}", "duration": load.seconds}


def _of_run(given: dict[str, Any]) -> RunOptions:
    try:
        run = RunOptions(url=_ANYWHERE, **given)
    except ValidationError as error:
        raise typer.BadParameter(complaints_of(error)) from None
    if not any(given.get(name) for name in ("concurrency", "rate", "trace")):
        raise typer.BadParameter("give --concurrency (closed loop), --rate (open loop), or --trace")
    if len(run.loads()) > 1:
        raise typer.BadParameter("one load at a time: give -c or -r a single value")
    if not run.endpoint.generates:
        raise typer.BadParameter(f"-e {run.endpoint} has no prefix caches and no streams to compare")
    return run


def _install(options: CompareOptions) -> None:
    complaints = Console(stderr=True)
    for asked in options.install or []:
        name, _, what = asked.partition("=")
        try:
            (peer,) = named([name])
            pip_install(options.peers, peer, lambda text: say(complaints, text), what)
        except (ValueError, NotInstalled) as error:
            raise fail(error, 1) from None


def _listing(peers_dir: Path) -> Table:
    table = Table("proxy", "policy", "version", "how to have it", box=None, padding=(0, 2))
    for arm in (arm_info(peer, peers_dir) for peer in PEERS.values()):
        table.add_row(arm.name, arm.policy, arm.version or "-", arm.missing.removeprefix("not installed: "))
    return table


def show(comparison: Comparison, console: Console) -> None:
    """Prints the tables, the best arms, and the notes."""
    for shown in tables(comparison, compact=True):
        table = Table(*shown.head, title=shown.title, title_justify="left", box=None, padding=(0, 1))
        for column in table.columns[1:]:
            column.justify = "right"
        for number, row in enumerate(shown.rows):
            table.add_row(*(f"[bold]{cell}[/]" if (number, at) in shown.best else cell for at, cell in enumerate(row)))
        console.print(table)
        console.print()
    for line in winners(comparison):
        say(console, f"best {line}")
    for note in notes(comparison):
        say(console, note, "dim")


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes the comparison's own files (its runs have folders of their own) and returns their paths."""
    texts = {
        "compare.json": comparison.model_dump_json(indent=1) + "\n",
        "compare.md": markdown(comparison),
        "report.html": comparison_page(comparison, _with_pages(comparison, folder)),
        "ttft.svg": picture(comparison),
        "killed.svg": _killed(comparison),
    }
    written = []
    for name, text in texts.items():
        if text:
            path = folder / name
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def _with_pages(comparison: Comparison, folder: Path) -> set[str]:
    return {turn.folder for turn in comparison.turns if (folder / turn.folder / "report.html").exists()}


def _killed(comparison: Comparison) -> str:
    arms = [arm.name for arm in comparison.arms]
    return report.picture(comparison.killed, arms) if comparison.killed else ""
