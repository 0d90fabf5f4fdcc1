"""`loadtest report`: makes pages anew from what runs have written, and compares runs or series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.text import Text

from loadtest.console import plain_table, say, say_written
from loadtest.report.compared_page import compared_page
from loadtest.report.diff import (
    FIGURES_HEAD,
    MADE_HEAD,
    Diff,
    FailRule,
    RuleError,
    broken,
    colour,
    diff,
    diff_of_many,
    figure_rows,
    rule_of,
)
from loadtest.report.files import Saved, UnreadableError, read, runs_of, write_page, write_series, write_summary

_CHECKPOINT_PARTS = ("servers", "gateway_version", "packages", "source", "hardware", "runtime")
_NAME = "compared.html"
_COLOURS = {"better": "green", "worse": "red"}

Paths = Annotated[
    list[Path],
    typer.Argument(help="Folder of a run or series, or its results.json or series.json; several are compared."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help=f"The comparison's page. Default: {_NAME}. The files of a single report are renewed where they are."
    ),
]
FailIf = Annotated[
    list[str] | None,
    typer.Option(
        help="Such as 'ttft_p95>+5%' (a change, in percent), 'ttft_p95>+20' (in its unit) or 'ttft_p95>500' (the "
        "value itself). May be given several times; exit code 1 where one is broken."
    ),
]


def report(paths: Paths, out: Out = None, fail_if: FailIf = None) -> None:
    """Make reports anew from their files, or compare two or more runs or series.

    Exit code 0: fine. 1: a rule is broken. 2: usage, or files that cannot be read.
    """
    console = Console()
    try:
        rules = [rule_of(text) for text in fail_if or []]
        saved = [read(path) for path in paths]
    except (RuleError, UnreadableError) as error:
        raise typer.BadParameter(str(error)) from None
    complaints = (
        _compare(saved, rules, out or Path(_NAME), console) if saved[1:] else _renew(saved[0], rules, out, console)
    )
    for complaint in complaints:
        say(console, f"✗ {complaint}", "red")
    raise typer.Exit(1 if complaints else 0)


def _renew(saved: Saved, rules: Sequence[FailRule], out: Path | None, console: Console) -> list[str]:
    if out is not None:
        raise typer.BadParameter("--out is for the page of a comparison; a report's files are renewed where they are")
    if changing := [rule.text for rule in rules if rule.change]:
        raise typer.BadParameter(f"{changing[0]!r} is a change, so it wants two reports")
    if saved.run is not None:
        written = [write_page(saved.run, saved.records, saved.folder), *write_summary(saved.run, saved.folder)]
    else:
        runs = [write_page(one.run, one.records, one.folder) for one in runs_of(saved) if one.run is not None]
        written = [*write_series(saved.series, saved.folder), *runs]
    say_written(console, written)
    return broken(rules, diff(saved.series, saved.series, {}, {}).pairs)


def _compare(saved: Sequence[Saved], rules: Sequence[FailRule], out: Path, console: Console) -> list[str]:
    """Rules hold for each of the others against the first one. Two are shown in the terminal, too."""
    sides, checkpoints = [one.series for one in saved], [_checkpoint(one) for one in saved]
    paired = diff_of_many(sides)
    complaints = [
        text if len(saved) == 2 else f"{one.name}: {text}"
        for one, pairs in zip(saved[1:], paired, strict=True)
        for text in broken(rules, pairs)
    ]
    if len(saved) == 2:
        _show(diff(sides[0], sides[1], checkpoints[0], checkpoints[1]), console)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(compared_page(saved, paired, checkpoints, complaints), encoding="utf-8")
    say_written(console, [out])
    return complaints


def _checkpoint(saved: Saved) -> dict[str, Any]:
    """What the checkpoint (of a series: its first run's) has on machines and serve commands, where there is one."""
    folder = saved.folder if saved.run is not None else saved.folder / next(iter(saved.series.folders), "")
    try:
        document = orjson.loads((folder / "checkpoint.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return (
        {name: document[name] for name in _CHECKPOINT_PARTS if name in document} if isinstance(document, dict) else {}
    )


def _show(found: Diff, console: Console) -> None:
    if found.made:
        made = (map(Text, row) for row in found.made)
        title = "How they were made, where that differs"
        console.print(plain_table(title, MADE_HEAD, made, justify="left", overflow="fold"))
    for pair in found.pairs:
        title = f"Figures: {pair.label}" if pair.label else "Figures"
        rows = (_cells(cells, _COLOURS.get(colour(change) or "", "")) for change, cells in figure_rows(pair))
        console.print(plain_table(Text(title), FIGURES_HEAD, rows, overflow="fold"))
    for text in found.unmatched:
        say(console, text, "yellow")


def _cells(cells: Sequence[str], style: str) -> Iterator[Text]:
    for name, cell in zip(FIGURES_HEAD, cells, strict=True):
        yield Text(cell, style=style if name == "change" else "")
