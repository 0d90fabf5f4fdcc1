"""`loadtest run --find`: runs at one load after the other, and tells the highest one that keeps the SLO."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from loadtest.checkpoint.keep import Keeping
from loadtest.console import say, say_written
from loadtest.drive.fleet import Stopped, StopSignals, WorkerDied
from loadtest.drive.options import RunOptions
from loadtest.drive.run import Order, measured
from loadtest.drive.search import Aim, LoadSearch
from loadtest.drive.spelling import Load
from loadtest.drive.target import Target, TargetError
from loadtest.report.answer import FoundLoad, answer_of, carries
from loadtest.report.files import write_results, write_series
from loadtest.report.series import Ran, Series, folder_of, series_of
from loadtest.report.series_tables import run_line
from loadtest.report.terminal import show_series

_SEED_STEP = 1000


def find(options: RunOptions, target: Target, console: Console, keeping: Keeping | None) -> bool:
    """Whether some load keeps the SLO. Raises the errors of the first run; a later failure ends the search."""
    assert options.find is not None
    search, ran = LoadSearch(options.find), list[Ran]()
    ((_, url),) = options.target_urls.items()
    seed, stopped, failures = options.drawn_seed(), False, dict[str, str]()
    with StopSignals() as between_runs:
        while (value := search.next()) is not None and not stopped:
            load = load_of(options.find, value)
            plan = options.plan(url, target, load, seed)
            order = Order(plan, target, bounds=options.bounds, pages=options.pages(target), out=options.out)
            try:
                results, records = measured(order, console)
            except (Stopped, TargetError, WorkerDied, OSError) as error:
                if not ran:
                    raise
                folder = folder_of("", load.label, sum(one.load == load.label for one in ran))
                failures[folder] = str(error) or "ended by hand"
                say(console, f"{folder}: failed: {failures[folder]}", "red")
                break
            stopped = results.verdict.ended_early or between_runs.asked()
            if stopped:
                break
            if not results.requests.offered:
                folder = folder_of("", load.label, sum(one.load == load.label for one in ran))
                failures[folder] = f"no request came in {plan.duration_seconds:g} s; a longer --duration has some"
                say(console, f"{folder}: {failures[folder]}", "red")
                break
            ran.append(Ran("", load.label, sum(one.load == load.label for one in ran), results=results))
            if results.verdict.valid:
                search.take(value, passed=carries(results))
            else:
                search.take_spoilt(value)
            say(console, run_line(ran[-1].folder, results))
            if options.out is not None:
                written = write_results(results, records, options.out / ran[-1].folder)
                if keeping is not None:
                    keeping.keep("", plan, bounds=options.bounds, results=results, records=records, written=written)
            seed += _SEED_STEP
    if not ran:
        return False
    answer = answer_of(search, ran, stopped=stopped or bool(failures))
    series = _series(ran, answer, failures)
    show_series(series, console)
    for line in answer.lines if series.passed else []:
        say(console, line, "bold")
    if options.out is not None:
        say_written(console, write_series(series, options.out))
    return answer.load is not None


def load_of(aim: Aim, value: float) -> Load:
    """A load as the options would give it."""
    if aim is Aim.CONCURRENCY:
        return Load(f"c{value:g}", {"concurrency": round(value)})
    return Load(f"r{value:g}", {"rate_per_second": value})


def _series(ran: list[Ran], answer: FoundLoad, failures: Mapping[str, str]) -> Series:
    """All runs as a series; loads beyond the limit are findings, not failures."""
    series = series_of(sorted(ran, key=lambda one: offered(one)), ran[0].results.environment, failures)
    passed = answer.load is not None
    changes = {"passed": passed, "reasons": [] if passed else answer.lines, "answer": answer.lines}
    return series.model_copy(update=changes)


def offered(one: Ran) -> float:
    """The requested load of a run: users, or requests a second."""
    plan = one.results.plan
    return float(plan["concurrency"] or plan["rate_per_second"])
