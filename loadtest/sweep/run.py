"""Carries a sweep out: starts, measures and stops each configuration's server; keeps results; estimates the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from rich.console import Console

from loadtest.access import Access
from loadtest.checkpoint.document import failed
from loadtest.checkpoint.keep import Checkpoints, CommandContext
from loadtest.checkpoint.markdown import check_line
from loadtest.checkpoint.servers import neighbours
from loadtest.console import say
from loadtest.drive.fleet import Stopped, WorkerDied
from loadtest.drive.run import Order, measured
from loadtest.drive.target import Target, TargetError, look_at
from loadtest.report.formatting import milliseconds, number, seconds_text
from loadtest.report.schema import Results
from loadtest.servers.processes import free_ports
from loadtest.servers.server import Launch, Server, ServerFailed
from loadtest.sweep.judge import Judged, Round, best, judged, rounds
from loadtest.sweep.plan import SweepPlan, Way, Workload
from loadtest.sweep.server import engine, gateway
from loadtest.sweep.space import Configuration, Space, fixed_flags, gpus_of
from loadtest.sweep.store import Failure, Store, SweepRun


@dataclass(frozen=True, slots=True)
class Work:
    """Servers to start, and the shares of whole runs to make, added up."""

    starts: float
    shares: float

    def __add__(self, other: Work) -> Work:
        return Work(self.starts + other.starts, self.shares + other.shares)


@dataclass(slots=True)
class Pace:
    """Learns from each start and each run."""

    _starts: list[float] = field(default_factory=list)
    _run_seconds: float = 0.0
    _shares: float = 0.0

    def started(self, seconds: float) -> None:
        """Record a server's duration, with or without its stop."""
        self._starts.append(seconds)

    def ran(self, seconds: float, share: float) -> None:
        """Record the duration of a run of that share of a whole one."""
        self._run_seconds += seconds
        self._shares += share

    def seconds_left(self, work: Work) -> float | None:
        """None before the first start, or the first run if runs remain."""
        if not self._starts or (work.shares and not self._shares):
            return None
        runs = work.shares * self._run_seconds / self._shares if work.shares else 0.0
        return work.starts * sum(self._starts) / len(self._starts) + runs


@dataclass(frozen=True, slots=True)
class Stage:
    """A round under one workload: its trials."""

    workload: Workload
    share: float
    configurations: list[Configuration]


@dataclass(slots=True)
class Sweep:
    """A plan under way."""

    plan: SweepPlan
    _: KW_ONLY
    space: Space
    store: Store
    console: Console
    should_stop: Callable[[], bool]
    stages: list[Stage] = field(default_factory=list)
    _pace: Pace = field(default_factory=Pace)
    _site: CommandContext | None = None

    def carry_out(self) -> None:
        """All rounds. Raises Stopped; finished runs are kept."""
        still = {workload.name: self.space.configurations for workload in self.plan.workloads}
        ahead = self.rounds()
        for place, this in enumerate(ahead):
            stages = [Stage(workload, this.share, still[workload.name]) for workload in self.plan.workloads]
            self.stages += stages
            self._round(stages, self._expected(ahead[place + 1 :]))
            for stage in stages if place + 1 < len(ahead) else ():
                still[stage.workload.name] = best(self.found(stage, self.plan.through[0]), ahead[place + 1].count)

    def rounds(self) -> list[Round]:
        """How many configurations are tried, for how long."""
        return rounds(len(self.space.configurations), self.plan.halving if self.plan.search == "halving" else None)

    def found(self, stage: Stage, way: Way) -> dict[Configuration, Judged]:
        """The results of a stage's configurations, without failed or pending ones."""
        found = {}
        for configuration in stage.configurations:
            runs = [self.store.results(cell) for cell in self._cells(configuration, stage, way)]
            ended = [run for run in runs if run is not None]
            if len(ended) == len(runs):
                found[configuration] = judged(ended, self.plan.objective, self.gpus(configuration))
        return found

    def failures(self, stage: Stage, way: Way) -> dict[Configuration, Failure]:
        found = {}
        for configuration in stage.configurations:
            for cell in self._cells(configuration, stage, way):
                if (failure := self.store.failure(cell)) is not None:
                    found[configuration] = failure
                    break
        return found

    def runs(self, stage: Stage, way: Way, configuration: Configuration) -> list[Results]:
        results = (self.store.results(cell) for cell in self._cells(configuration, stage, way))
        return [found for found in results if found is not None]

    def gpus(self, configuration: Configuration) -> int:
        chosen = {flag: value for flag, value in configuration.flags if value is not None}
        return gpus_of(fixed_flags(self.plan) | chosen)

    def _cells(self, configuration: Configuration, stage: Stage, way: Way) -> list[SweepRun]:
        return [
            SweepRun(configuration, way, stage.workload, share=stage.share, repetition=repetition)
            for repetition in range(self.plan.repeat)
        ]

    def _expected(self, ahead: Sequence[Round]) -> Work:
        """The expected work of later rounds: workloads may keep different configurations."""
        loads = len(self.plan.workloads)
        whole = loads * len(self.plan.through) * self.plan.repeat
        most = len(self.space.configurations)
        return sum((Work(min(loads * this.count, most), this.count * this.share * whole) for this in ahead), Work(0, 0))

    def _round(self, stages: Sequence[Stage], later: Work) -> None:
        todo = list(self._todo(stages))
        for place, (configuration, cells) in enumerate(todo, 1):
            left = later
            for _, others in todo[place - 1 :]:
                left += Work(1, sum(cell.share for cell in others))
            seconds = self._pace.seconds_left(left)
            length = f", runs of {stages[0].share:.0%}" if stages[0].share < 1 else ""
            about = f", about {seconds_text(seconds)} left" if seconds is not None else ""
            say(self.console, f"[{place}/{len(todo)}{length}{about}] {configuration.label}", "bold")
            self._configuration(configuration, cells)

    def _todo(self, stages: Sequence[Stage]) -> Iterator[tuple[Configuration, list[SweepRun]]]:
        """Each configuration with its runs that have not ended: one start serves all workloads."""
        for configuration in self.space.configurations:
            cells = [
                cell
                for way in self.plan.through
                for stage in stages
                if configuration in stage.configurations
                for cell in self._cells(configuration, stage, way)
                if not self.store.is_done(cell)
            ]
            if cells:
                yield configuration, cells

    def _configuration(self, configuration: Configuration, cells: Sequence[SweepRun]) -> None:
        if self.should_stop():
            raise Stopped
        log = self.store.folder_of(configuration) / "server.log"
        port, gateway_port = free_ports(2)
        try:
            with self._server(engine(self.plan, configuration, port), log) as server:
                self._pace.started(server.start_seconds)
                for way in self.plan.through:
                    mine = [cell for cell in cells if cell.way == way]
                    if mine and way == "gateway":
                        self._through_gateway(server, gateway_port, mine)
                    else:
                        self._measure_all(server, server.url, mine)
        except ServerFailed as failed:
            self._failed(cells, failed)

    def _through_gateway(self, server: Server, port: int, cells: Sequence[SweepRun]) -> None:
        launch = gateway(self.plan, server.url, port)
        try:
            with self._server(launch, server.log.with_name("gateway.log")) as before:
                self._measure_all(server, before.url, cells)
        except ServerFailed as failed:
            server.check()
            self._failed(cells, failed)

    @contextmanager
    def _server(self, launch: Launch, log: Path) -> Iterator[Server]:
        def heed(_elapsed_seconds: float) -> None:
            if self.should_stop():
                raise Stopped

        with Server(launch, log, heed) as server:
            try:
                yield server
            finally:
                server.stop()
                server.wait_gone()  # the next server needs the memory of all of it

    def _measure_all(self, server: Server, url: str, cells: Sequence[SweepRun]) -> None:
        for cell in cells:
            if self.should_stop():
                raise Stopped
            started = time.monotonic()
            try:
                self._measure(server, url, cell)
            except (TargetError, WorkerDied, OSError) as error:
                server.check()
                self._failed([cell], ServerFailed(str(error)))
            self._pace.ran(time.monotonic() - started, cell.share)

    def _measure(self, server: Server, url: str, cell: SweepRun) -> None:
        options = cell.workload.options(url, cell.share, cell.repetition)
        (load,) = options.loads()
        target = asyncio.run(look_at(url, Access(), options.model))
        page = self._page(server, target, options.model)
        plan = options.plan(url, target, load, options.drawn_seed())
        results, records = measured(Order(plan, target, bounds=options.bounds, pages=page, out=None), self.console)
        if results.verdict.ended_early:
            raise Stopped
        server.check()
        driven = "gateway" if cell.way == "gateway" else "engine"
        servers = {driven: url, "engine": server.url}
        checkpoints = Checkpoints(asyncio.run(neighbours(servers, {}, None, Access())), options.verify, site=self._site)

        def checked(written: Sequence[Path]) -> None:
            made = checkpoints.keep(
                driven, plan, bounds=options.bounds, results=results, records=records, written=written
            )
            for check in failed(made.checks):
                say(self.console, f"  {check_line(check)}", "red")

        self.store.keep(cell, results, records, checked)
        self._site = checkpoints.site
        found = judged([results], self.plan.objective, self.gpus(cell.configuration))
        say(
            self.console,
            f"  {cell.workload.name}, {cell.way}: {summary_line(found, self.plan)}",
            None if found.fits else "red",
        )

    def _page(self, server: Server, target: Target, model: str | None) -> dict[str, str]:
        """The engine's own page, also where requests go through the gateway."""
        url = target.metrics_url or asyncio.run(look_at(server.url, Access(), model)).metrics_url
        return {"engine": url} if url else {}

    def _failed(self, cells: Sequence[SweepRun], failed: ServerFailed) -> None:
        for cell in cells:
            if not self.store.is_done(cell):
                self.store.keep_failure(cell, Failure(why=failed.why, log=failed.log))
        say(self.console, f"  {failed.why}", "red")
        for line in failed.log[-3:]:
            say(self.console, f"    {line}", "dim")


def summary_line(found: Judged, plan: SweepPlan) -> str:
    """The result of a configuration, in a line."""
    parts = [f"{number(found.value)} {plan.objective.maximise.value.replace('_', ' ')}"]
    parts += [
        f"{name} p95 {milliseconds(1e3 * value)}"
        for name, key in (("TTFT", "ttft_p95_seconds"), ("TPOT", "tpot_p95_seconds"))
        if (value := found.figures.get(key)) is not None
    ]
    return ", ".join(parts) + ("" if found.fits else f" ({'; '.join(found.complaints)})")
