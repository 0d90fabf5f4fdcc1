"""`loadtest run`: inspects the target, warms up, measures, summarises, writes; and series of runs.

A series runs every target under every load in turns, so that drift of the machines affects all of them alike.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadtest.checkpoint.keep import Keeping
from loadtest.checkpoint.machine import environment
from loadtest.console import say, say_written
from loadtest.drive.capacity import client_limits
from loadtest.drive.fleet import Stopped, StopSignals, WorkerDied, WorkerFleet
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.sampling import Sampling
from loadtest.drive.target import Target, TargetError, change, read_counters
from loadtest.report.files import write_results, write_series, write_summary
from loadtest.report.formatting import load_text, requested_text
from loadtest.report.repeating import is_settled, spoilt_loads, why_unsettled
from loadtest.report.schema import Bounds, Results
from loadtest.report.series import Ran, Series, folder_of, series_of
from loadtest.report.series_tables import run_line
from loadtest.report.summarise import summarise
from loadtest.report.terminal import Progress, show, show_series


@dataclass(frozen=True, slots=True)
class Order:
    """A run as the user ordered it."""

    plan: Plan
    target: Target
    _: KW_ONLY
    bounds: Bounds
    pages: Mapping[str, str]
    out: Path | None
    target_name: str = ""


def carry_out(order: Order, console: Console, keeping: Keeping | None = None) -> Results:
    """Runs the order, shows the results and writes them if the order names a folder."""
    results, records = measured(order, console)
    show(results, console)
    if order.out is not None:
        written = write_results(results, records, order.out)
        if keeping is not None:
            keeping.keep(
                order.target_name, order.plan, bounds=order.bounds, results=results, records=records, written=written
            )
        written += write_summary(results, order.out)
        say_written(console, written)
    return results


def measured(
    order: Order, console: Console, beside: AbstractContextManager[object] | None = None
) -> tuple[Results, list[Record]]:
    """Warms up and runs the order, `beside` around what is measured; shows its progress, but not its results."""
    started_at = datetime.now(UTC)
    with StopSignals() as signals, WorkerFleet(order.plan, signals.asked) as fleet:
        say(console, f"warming up {order.plan.url}", "dim")
        _check_warm_up(fleet.warm_up())
        limit, beyond = client_limits(order.plan, fleet.capacities, os.cpu_count() or 1)
        say(console, limit, "dim")
        for complaint in beyond:
            say(console, f"! {complaint}", "yellow")
        before = _counters(order)
        shown = Progress(console, title(order.plan))
        sampling = Sampling(order.pages, order.plan.access, order.plan.url)
        with sampling, shown as progress, beside or nullcontext():
            harvest = fleet.measure(progress.take)
        counted = _counted_since(before, order, console)
    where = environment(sys.argv, started_at, order.target.server)
    samples = sampling.samples(harvest.origin)
    results = summarise(
        order.plan, harvest, bounds=order.bounds, environment=where, metrics_delta=counted, samples=samples
    )
    return results, harvest.records


def title(plan: Plan) -> str:
    bounds = [f"{plan.requests} {'sessions' if plan.keeps_text else 'requests'}"] if plan.requests else []
    bounds += [f"{plan.duration_seconds:g} s"] if plan.duration_seconds else []
    until = f" · {' or '.join(bounds)}" if bounds else ""
    recorded = plan.model_dump(mode="json")
    return f"{requested_text(recorded)} · {load_text(recorded)}{until}"


def _check_warm_up(records: Sequence[Record]) -> None:
    """A target that answers no warm-up request would only yield a report full of one error."""
    if records and not any(record.ok for record in records):
        kind, _ = Counter(record.outcome for record in records).most_common(1)[0]
        detail = next(record.detail for record in records if record.outcome == kind)
        raise TargetError(f"no warm-up request succeeded: {kind}: {detail}")


def _counted_since(before: Mapping[str, float], order: Order, console: Console) -> dict[str, float]:
    """How far counters moved; none where they cannot be read any more: a dead engine does not take the run along."""
    try:
        return change(before, _counters(order))
    except TargetError as error:
        say(console, f"no counters: {error}", "red")
        return {}


def _counters(order: Order) -> dict[str, float]:
    """Of all pages; where there are several, each one's name stands before its counters."""
    found: dict[str, float] = {}
    for name, url in order.pages.items():
        prefix = f"{name} " if len(order.pages) > 1 else ""
        read = asyncio.run(read_counters(url, order.plan.access, order.plan.url))
        found |= {prefix + counter: value for counter, value in read.items()}
    return found


# Apart by more than the parts of a mix, whose seeds follow each other.
_SEED_STEP = 1000


def orders_of(
    options: RunOptions, looked: Mapping[str, Target], are_enough: Callable[[], bool] = lambda: False
) -> Iterator[tuple[str, str, int, Order]]:
    """(target, load, repetition, order) in the order of the runs; another target begins each repetition.

    `are_enough` is asked before each repetition but the first.

    In one repetition all targets get the same prompts at the same times, in another they get others.
    """
    urls, seed = options.target_urls, options.drawn_seed()
    names = list(looked)
    for repetition in range(options.repetitions):
        if repetition and are_enough():
            return
        first = repetition % len(names)
        for load in options.loads():
            for name in names[first:] + names[:first]:
                plan = options.plan(urls[name], looked[name], load, seed)
                pages = options.pages(looked[name])
                order = Order(plan, looked[name], bounds=options.bounds, pages=pages, out=options.out, target_name=name)
                yield name, load.label, repetition, order
            seed += _SEED_STEP


def carry_out_series(
    options: RunOptions, looked: Mapping[str, Target], console: Console, keeping: Keeping | None = None
) -> Series | None:
    """Runs all of it, shows what it comes to and writes it where asked. None if no run came to its end.

    A run that cannot start is reported and fails the series, and the next one follows. A run that is ended by hand is
    the last one, and the series has failed as well.
    """
    ran: list[Ran] = []
    failures: dict[str, str] = {}
    narrow = options.narrow_to

    def are_enough() -> bool:
        return narrow is not None and (is_settled(ran, narrow) or bool(spoilt_loads(ran)))

    with StopSignals() as between_runs:
        for target, load, repetition, order in orders_of(options, looked, are_enough):
            folder = folder_of(target, load, repetition)
            try:
                found = None if between_runs.asked() else measured(order, console)
            except Stopped:
                found = None
            except (TargetError, WorkerDied, OSError) as error:
                failures[folder] = str(error)
                say(console, f"{folder}: failed: {error}", "red")
                continue
            if found is None or found[0].verdict.ended_early:
                failures[folder] = "ended by hand, as all that follow"
                break
            results, records = found
            one = Ran(target, load, repetition, results=results)
            ran.append(one)
            say(console, run_line(one.folder, results))
            if options.out is not None:
                written = write_results(results, records, options.out / one.folder)
                if keeping is not None:
                    keeping.keep(
                        order.target_name,
                        order.plan,
                        bounds=order.bounds,
                        results=results,
                        records=records,
                        written=written,
                    )
    if not ran:
        return None
    series = series_of(ran, ran[0].results.environment, failures)
    show_series(series, console)
    if narrow is not None and not is_settled(ran, narrow):
        say(console, f"! {why_unsettled(ran, narrow)}", "yellow")
    if options.out is not None:
        say_written(console, write_series(series, options.out))
    return series
