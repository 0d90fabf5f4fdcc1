"""`python -m tests.bench restarts`: restarts of the gateway in a row, under load."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from loadtest.servers.server import ServerFailed
from tests.bench.restarts import report
from tests.bench.restarts.run import Options, measure

_SHOWN_LINES = 20
_ROOT = Path()  # stands for a folder of the run's own
SMOKE = Options(100.0, 2, 0.5, 3.0, 1.0, 2.0, cold=False, seed=1, folder=_ROOT)


def restarts(
    requests_per_second: Annotated[float, typer.Option(min=1, help="Short ones; long streams come on top.")] = 200.0,
    restarts: Annotated[int, typer.Option(min=1, help="How many, in a row.")] = 20,
    seconds_between: Annotated[float, typer.Option(min=0, help="From the end of one to the next.")] = 5.0,
    longest_stream_seconds: Annotated[float, typer.Option(min=1, help="Long streams take 5 s to so long.")] = 60.0,
    warm_up_seconds: Annotated[float, typer.Option(min=1, help="Load before anything is measured.")] = 60.0,
    window_seconds: Annotated[float, typer.Option(min=1, help="For the hit rates before and after.")] = 60.0,
    cold: Annotated[bool, typer.Option(help="Compare the hit rate with that of a start without state.")] = True,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 1,
    keep: Annotated[Path | None, typer.Option(help="A folder for every request with its times, and logs.")] = None,
) -> None:
    """Restart the gateway under load; exit 1 if a request fails, a cap is exceeded, or the hit rate changes."""
    options = Options(
        requests_per_second,
        restarts,
        seconds_between,
        longest_stream_seconds,
        warm_up_seconds,
        window_seconds,
        cold,
        seed,
        keep or _ROOT,
    )
    show(options)


def show(options: Options) -> None:
    """Make a run and print its table. Raises typer.Exit if a bar is missed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.folder == _ROOT else options.folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            measured = measure(replace(options, folder=folder), lambda line: typer.echo(line, err=True))
        except (ServerFailed, OSError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
    typer.echo(report.table(measured))
    for line in measured.troubles[:_SHOWN_LINES]:
        typer.echo(f"log: {line}", err=True)
    if found := report.problems(measured):
        typer.echo("\n".join(["", "failed:", *found, *report.failures(measured)]), err=True)
        raise typer.Exit(1)
