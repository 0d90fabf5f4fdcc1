"""A whole run: look at the target, warm up, measure, summarise, write."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from loadtest.drive.fleet import Fleet
from loadtest.drive.keeping import Keeping
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.sampling import Sampling
from loadtest.drive.stopping import StopSignals
from loadtest.drive.target import Target, TargetError, change, read_counters
from loadtest.report.environment import environment
from loadtest.report.files import write_results, write_summary
from loadtest.report.live import Progress
from loadtest.report.load import asked_told, load_told
from loadtest.report.schema import Results
from loadtest.report.summarise import Bounds, summarise
from loadtest.report.terminal import show


@dataclass(frozen=True, slots=True)
class Order:
    """A run as the user ordered it."""

    plan: Plan
    target: Target
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
            keeping.keep(order.target_name, order.plan, order.bounds, results, records, written)
        written += write_summary(results, order.out)
        console.print("written:", ", ".join(str(path) for path in written), highlight=False, soft_wrap=True)
    return results


def measured(
    order: Order, console: Console, beside: AbstractContextManager[object] | None = None
) -> tuple[Results, list[Record]]:
    """Warms up and runs the order, `beside` around what is measured; shows its progress, but not its results."""
    started_at = datetime.now(UTC)
    with StopSignals() as signals, Fleet(order.plan, signals.asked) as fleet:
        console.print(f"warming up {order.plan.url}", style="dim", highlight=False)
        _check_warm_up(fleet.warm_up())
        before = _counters(order.pages)
        shown = Progress(console, title(order.plan))
        with Sampling(order.pages) as sampling, shown as progress, beside or nullcontext():
            harvest = fleet.measure(progress.take)
        counted = _counted_since(before, order.pages, console)
    where = environment(sys.argv, started_at, order.target.server)
    samples = sampling.samples(harvest.origin)
    results = summarise(order.plan, harvest, order.bounds, where, counted, samples)
    return results, harvest.records


def title(plan: Plan) -> str:
    bounds = [f"{plan.requests} {'sessions' if plan.keeps_text else 'requests'}"] if plan.requests else []
    bounds += [f"{plan.duration_seconds:g} s"] if plan.duration_seconds else []
    until = f" · {' or '.join(bounds)}" if bounds else ""
    recorded = plan.model_dump(mode="json")
    return f"{asked_told(recorded)} · {load_told(recorded)}{until}"


def _check_warm_up(records: Sequence[Record]) -> None:
    """A target that answers no warm-up request would only yield a report full of one error."""
    if records and not any(record.ok for record in records):
        kind, _ = Counter(record.outcome for record in records).most_common(1)[0]
        detail = next(record.detail for record in records if record.outcome == kind)
        raise TargetError(f"no warm-up request succeeded: {kind}: {detail}")


def _counted_since(before: Mapping[str, float], pages: Mapping[str, str], console: Console) -> dict[str, float]:
    """How far counters moved; none where they cannot be read any more: a dead engine does not take the run along."""
    try:
        return change(before, _counters(pages))
    except TargetError as error:
        console.print(f"no counters: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return {}


def _counters(pages: Mapping[str, str]) -> dict[str, float]:
    """Of all pages; where there are several, each one's name stands before its counters."""
    found: dict[str, float] = {}
    for name, url in pages.items():
        prefix = f"{name} " if len(pages) > 1 else ""
        found |= {prefix + counter: value for counter, value in asyncio.run(read_counters(url)).items()}
    return found
