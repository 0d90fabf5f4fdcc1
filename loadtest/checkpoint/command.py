"""`loadtest verify`: reads a checkpoint, checks it again, ends with an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from loadtest.checkpoint.document import Check, Checkpoint, Status, failed
from loadtest.checkpoint.drift import live
from loadtest.checkpoint.keep import JSON_NAME
from loadtest.checkpoint.markdown import check_line
from loadtest.checkpoint.recheck import read_files, recheck
from loadtest.drive.plan import Plan
from loadtest.drive.target import base_url

_STYLES = {Status.OK: "green", Status.FAILED: "red", Status.NOT_CHECKED: "dim"}


def verify(
    path: Annotated[
        Path, typer.Argument(exists=True, help="checkpoint.json, or a folder that has some.", metavar="CHECKPOINT")
    ],
    targets: Annotated[
        str | None,
        typer.Option(
            help="Where recorded servers are now, NAME=URL between commas, or the URL of the only target."
            " Default: where they were, if they are still up."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOADTEST_API_KEY", help="Sent as a bearer token, never recorded.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Look at the files alone, ask no server.")] = False,
) -> None:
    """Check a checkpoint again: its files (hashes, completeness, definitions), and its servers as far as they are up.

    Exit code 0: all holds. 1: something does not. 2: usage.
    """
    console = Console()
    if offline and targets:
        raise typer.BadParameter("--offline asks no server: leave out --targets")
    files = [path] if path.is_file() else sorted(path.rglob(JSON_NAME))
    if not files:
        raise typer.BadParameter(f"{path} holds no {JSON_NAME}")
    wrong = 0
    for file in files:
        checks = _checked(file, None if offline else _urls(targets), api_key)
        console.print(str(file), style="bold", markup=False, highlight=False, soft_wrap=True)
        for check in checks:
            console.print(check_line(check), style=_STYLES[check.status], markup=False, highlight=False, soft_wrap=True)
        wrong += len(failed(checks))
    told = "all that was checked holds" if not wrong else f"{wrong} thing{'s' if wrong > 1 else ''} not as it should be"
    console.print(told, style="red" if wrong else "green", highlight=False)
    raise typer.Exit(1 if wrong else 0)


def _checked(file: Path, urls: Mapping[str, str] | None, api_key: str | None) -> list[Check]:
    try:
        made = Checkpoint.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        found = str(error).splitlines()[0]
        return [Check(name="schema", status=Status.FAILED, expected="what a run writes", found=found)]
    if urls and (unknown := urls.keys() - {server.name for server in made.servers}):
        names = ", ".join(server.name or "the only target" for server in made.servers)
        raise typer.BadParameter(f"--targets: no server {', '.join(sorted(unknown))!r}; {file} has {names}")
    run = read_files(file.parent)
    checks = recheck(made, file.parent, run)
    if urls is None:
        return [*checks, Check(name="servers", status=Status.NOT_CHECKED, why="--offline")]
    try:
        plan = None if run.results is None else Plan.model_validate(run.results.plan)
    except ValidationError:
        plan = None  # told above
    if plan is None:
        return [*checks, Check(name="servers", status=Status.NOT_CHECKED, why="what to ask is in results.json")]
    return [*checks, *asyncio.run(live(made, plan, urls, api_key))]


def _urls(targets: str | None) -> dict[str, str]:
    """By name; a URL without one is the only target's."""
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, (targets or "").split(","))):
        name, equals, url = part.partition("=")
        if not equals or "/" in name:
            name, url = "", part
        found[name] = base_url(url)
    return found
