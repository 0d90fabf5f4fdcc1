"""`loadtest run`: reads the options, carries the run out, ends with an exit code."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console

from loadtest.checkpoint.keep import Keeping, prepared
from loadtest.drive.fleet import Stopped, WorkerDied
from loadtest.drive.options import RunOptions
from loadtest.drive.run import carry_out, carry_out_series, orders_of
from loadtest.drive.target import Target, TargetError, look_at
from loadtest.workloads.sources import DatasetError
from loadtest.workloads.trace import TraceError


def run(options: RunOptions) -> None:
    """Load an OpenAI-compatible URL, measure it, and check that the measurement is valid.

    Exit code 0: fine. 1: requests failed, the SLO was missed, the client itself was the limit, or a check of the
    servers failed. 2: usage.
    """
    console, complaints = Console(), Console(stderr=True)
    try:
        options.check_files()
        urls = options.target_urls
        looked = {name: asyncio.run(look_at(url, options.api_key, options.model)) for name, url in urls.items()}
        looked, keeping = prepared(options, looked, console)
        passed = _carried_out(options, looked, console, keeping) and (keeping is None or keeping.passed)
    except (TraceError, DatasetError) as error:
        raise typer.BadParameter(str(error)) from None
    except (TargetError, WorkerDied, OSError) as error:
        complaints.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except (Stopped, KeyboardInterrupt):
        complaints.print("stopped; there is nothing to report", style="red")
        raise typer.Exit(1) from None
    raise typer.Exit(0 if passed else 1)


def _carried_out(options: RunOptions, looked: Mapping[str, Target], console: Console, keeping: Keeping | None) -> bool:
    if options.runs > 1:
        series = carry_out_series(options, looked, console, keeping)
        return series is not None and series.passed
    (_, _, _, order) = next(orders_of(options, looked))
    return carry_out(order, console, keeping).verdict.passed


def with_options(command: Callable[[RunOptions], None]) -> Callable[..., None]:
    """The command as a function of single options, as typer reads them; the model stays the only list of options."""

    def called(**values: Any) -> None:
        try:
            options = RunOptions(**values)
        except ValidationError as error:
            raise typer.BadParameter(complaints_of(error)) from None
        command(options)

    called.__doc__ = command.__doc__
    called.__signature__ = inspect.Signature(parameters_of(RunOptions))  # type: ignore[attr-defined]
    return called


def parameters_of(options: type[BaseModel], names: Iterable[str] | None = None) -> list[inspect.Parameter]:
    """The fields of a list of options as parameters that typer reads; all, or those of the names."""
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
    """What is wrong with the options, for the user."""
    return "; ".join(part["msg"].removeprefix("Value error, ") for part in error.errors())
