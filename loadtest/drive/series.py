"""Several runs in turns, every target under every load, again and again: drift of the machines hits all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from loadtest.drive.fleet import Stopped, WorkerDied
from loadtest.drive.keeping import Keeping
from loadtest.drive.options import RunOptions
from loadtest.drive.run import Order, measured
from loadtest.drive.stopping import StopSignals
from loadtest.drive.target import Target, TargetError
from loadtest.report.files import write_results, write_series
from loadtest.report.series import Ran, Series, folder_of, series_of
from loadtest.report.series_tables import run_line
from loadtest.report.terminal import show_series

# Apart by more than the parts of a mix, whose seeds follow each other.
_SEED_STEP = 1000


def orders_of(options: RunOptions, looked: Mapping[str, Target]) -> Iterator[tuple[str, str, int, Order]]:
    """(target, load, repetition, order) in the order of the runs; another target begins each repetition.

    In one repetition all targets get the same prompts at the same times, in another they get others.
    """
    urls, seed = options.target_urls, options.drawn_seed()
    names = list(looked)
    for repetition in range(options.repeat):
        first = repetition % len(names)
        for load in options.loads():
            for name in names[first:] + names[:first]:
                plan = options.plan(urls[name], looked[name], load, seed)
                pages = options.pages(looked[name])
                order = Order(plan, looked[name], options.bounds, pages, options.out, name)
                yield name, load.label, repetition, order
            seed += _SEED_STEP


def carry_out_series(
    options: RunOptions, looked: Mapping[str, Target], console: Console, keeping: Keeping | None = None
) -> Series | None:
    """Runs all of it, shows what it comes to and writes it where asked. None if no run came to its end.

    A run that cannot be made is told, fails the series, and the next one follows. After one that is ended by hand none
    follows, and the series has failed as well.
    """
    ran: list[Ran] = []
    failures: dict[str, str] = {}
    with StopSignals() as between_runs:
        for target, load, repetition, order in orders_of(options, looked):
            folder = folder_of(target, load, repetition)
            try:
                found = None if between_runs.asked() else measured(order, console)
            except Stopped:
                found = None
            except (TargetError, WorkerDied, OSError) as error:
                failures[folder] = str(error)
                console.print(f"{folder}: failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
                continue
            if found is None or found[0].verdict.ended_early:
                failures[folder] = "ended by hand, as all that follow"
                break
            results, records = found
            one = Ran(target, load, repetition, results)
            ran.append(one)
            console.print(run_line(one.folder, results), highlight=False, markup=False, soft_wrap=True)
            if options.out is not None:
                written = write_results(results, records, options.out / one.folder)
                if keeping is not None:
                    keeping.keep(order.target_name, order.plan, order.bounds, results, records, written)
    if not ran:
        return None
    series = series_of(ran, ran[0].results.environment, failures)
    show_series(series, console)
    if options.out is not None:
        _tell(write_series(series, options.out), console)
    return series


def _tell(written: list[Path], console: Console) -> None:
    console.print("written:", ", ".join(str(path) for path in written), highlight=False, soft_wrap=True)
