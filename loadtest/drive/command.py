"""`loadtest run` as a command: what it carries out, what stops it before a report, and its exit codes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import typer
from rich.console import Console

from loadtest.checkpoint.keep import Keeping, prepared
from loadtest.console import fail
from loadtest.drive.fallback import adapted
from loadtest.drive.finding import find
from loadtest.drive.fleet import Stopped, WorkerDied
from loadtest.drive.options import RunOptions
from loadtest.drive.run import carry_out, carry_out_series, orders_of
from loadtest.drive.target import Target, TargetError, look_at
from loadtest.workloads.bodies import DatasetError
from loadtest.workloads.trace import TraceError


def run(options: RunOptions) -> None:
    """Load an OpenAI-compatible URL, measure it, and check that the measurement is valid.

    Exit code 0: fine. 1: requests failed, the SLO was missed, the client itself was the limit, or a check of the
    servers failed. 2: usage.
    """
    console = Console()
    try:
        options.check_files()
        urls = options.target_urls
        looked = {name: asyncio.run(look_at(url, options.access, options.model)) for name, url in urls.items()}
        options = adapted(options, looked, console)
        looked, keeping = prepared(options, looked, console)
        passed = _carried_out(options, looked, console, keeping) and (keeping is None or keeping.passed)
    except (TraceError, DatasetError) as error:
        raise typer.BadParameter(str(error)) from None
    except (TargetError, WorkerDied, OSError) as error:
        raise fail(error, 1) from None
    except (Stopped, KeyboardInterrupt):
        raise fail("stopped; there is nothing to report", 1) from None
    raise typer.Exit(0 if passed else 1)


def _carried_out(options: RunOptions, looked: Mapping[str, Target], console: Console, keeping: Keeping | None) -> bool:
    if options.find is not None:
        return find(options, looked[""], console, keeping)
    if options.runs > 1:
        series = carry_out_series(options, looked, console, keeping)
        return series is not None and series.passed
    (_, _, _, order) = next(orders_of(options, looked))
    return carry_out(order, console, keeping).verdict.passed
