"""How commands read options and print: lines, complaints and tables of the terminal, and tables in Markdown."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from pydantic import BaseModel, ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Options = TypeVar("Options", bound=BaseModel)


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option of a panel of the help page; without names it is called as its parameter."""
    return typer.Option(*names, rich_help_panel=panel, help=text, **more)


def with_options(
    command: Callable[..., None], options: type[Options], others: Iterable[inspect.Parameter] = ()
) -> Callable[..., None]:
    """The command as a function of single options, as typer reads them; the model stays the only list of options.

    `others` are further parameters, which the command gets by name.
    """

    def called(**values: Any) -> None:
        own = {name: values.pop(name) for name in options.model_fields}
        try:
            made = options(**own)
        except ValidationError as error:
            raise typer.BadParameter(complaints_of(error)) from None
        command(made, **values)

    called.__doc__ = command.__doc__
    called.__signature__ = inspect.Signature([*parameters_of(options), *others])  # type: ignore[attr-defined]
    return called


def parameters_of(options: type[BaseModel], names: Iterable[str] | None = None) -> list[inspect.Parameter]:
    """The fields of a list of options as parameters that typer reads; all, or the named ones."""
    hints = get_type_hints(options, include_extras=True)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.is_required() else field.default,
            annotation=hints[name],
        )
        for name, field in options.model_fields.items()
        if names is None or name in names
    ]


def complaints_of(error: ValidationError) -> str:
    """The problem with the options, for the user."""
    return "; ".join(part["msg"].removeprefix("Value error, ") for part in error.errors())


def command_line() -> str:
    """The command as typed, for its output files."""
    return shlex.join(["loadtest", *sys.argv[1:]])


def say(console: Console, text: object, style: str | None = None) -> None:
    """Prints a line as it is: no markup, no colours of its own, no line breaks."""
    console.print(str(text), style=style, markup=False, highlight=False, soft_wrap=True)


def fail(error: object, code: int = 2) -> typer.Exit:
    """Prints the reason to stderr; returns the exception to raise."""
    say(Console(stderr=True), error, "red")
    return typer.Exit(code)


def say_written(console: Console, written: Iterable[Path]) -> None:
    say(console, f"written: {', '.join(map(str, written))}")


def plain_table(
    title: str | Text | None, head: Sequence[str], rows: Iterable[Iterable[str | Text]] = (), **more: Any
) -> Table:
    """A table of the terminal; all but the first column, and those without a title, are on the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    for place, name in enumerate(head):
        table.add_column(name, **{"justify": "right" if place and name else "left", **more})
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int | None = None) -> str:
    """Cells in Markdown; the first `texts` columns, or all, are left-aligned, the others right-aligned."""
    left = len(head) if texts is None else texts
    dashes = ["---"] * left + ["--:"] * (len(head) - left)
    lines = [head, dashes, *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
