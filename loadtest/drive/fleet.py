"""The worker processes of a run, seen from the parent."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Self

from loadtest.drive.health import WorkerHealth
from loadtest.drive.messages import Finished, FromWorker, Progress, Ready, Start, Stop, ToWorker
from loadtest.drive.plan import Plan
from loadtest.drive.process import work
from loadtest.drive.record import Record
from loadtest.drive.stopping import STOP_SIGNALS

if TYPE_CHECKING:
    Channel = Connection[ToWorker, FromWorker]

_POLL_SECONDS = 0.1
_START_DELAY_SECONDS = 0.2
_END_GRACE_SECONDS = 5.0


class WorkerDied(Exception):
    """A worker process ended without its report; nothing of the run can be trusted."""


class Stopped(Exception):
    """The user ended the run before anything was measured."""


@dataclass(slots=True)
class Harvest:
    """Everything a run brought in."""

    records: list[Record] = field(default_factory=list)
    itl_ticks: Counter[int] = field(default_factory=Counter)
    healths: list[WorkerHealth] = field(default_factory=list)
    stopped_early: bool = False
    origin: float = 0.0  # the run's zero on the monotonic clock


@dataclass(frozen=True, slots=True)
class Tick:
    """News for a live display: what ended since the last one, and what is in flight."""

    elapsed_seconds: float
    records: list[Record]
    in_flight: int


class Fleet:
    """Starts the workers on entry and leaves no process behind on exit."""

    def __init__(self, plan: Plan, should_stop: Callable[[], bool]) -> None:
        self._plan = plan
        self._should_stop = should_stop
        self._channels: list[Channel] = []
        self.processes: list[BaseProcess] = []
        self._in_flight: dict[int, int] = {}

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        # A signal may reach the whole process group; workers inherit the disregard, and the parent tells them instead.
        restored = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
        try:
            for worker in range(self._plan.workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(theirs, self._plan, worker), daemon=True)
                process.start()
                theirs.close()
                self._channels.append(ours)
                self.processes.append(process)
        finally:
            for number, handler in restored.items():
                signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + (_END_GRACE_SECONDS if kind is None else 0.0)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def warm_up(self) -> list[Record]:
        """Waits until every worker has warmed up; their warm-up requests, which count for nothing else."""
        warmup: list[Record] = []
        waiting = set(self._channels)
        while waiting:
            if self._should_stop():
                raise Stopped
            for channel in self._readable(waiting):
                message = self._heard(channel)
                assert isinstance(message, Ready)
                warmup += message.warmup
                waiting.discard(channel)
        return warmup

    def measure(self, on_tick: Callable[[Tick], None]) -> Harvest:
        """Runs the measured part to its end, or until the user stops it."""
        origin = time.monotonic() + _START_DELAY_SECONDS
        harvest = Harvest(origin=origin)
        self._tell(Start(origin))
        running = set(self._channels)
        while running:
            if self._should_stop() and not harvest.stopped_early:
                harvest.stopped_early = True
                self._tell(Stop())
            fresh: list[Record] = []
            for channel in self._readable(running):
                message = self._heard(channel)
                if isinstance(message, Finished):
                    harvest.healths.append(message.health)
                    harvest.itl_ticks.update(message.itl_ticks)
                    running.discard(channel)
                elif isinstance(message, Progress):
                    self._in_flight[message.worker] = message.in_flight
                    fresh += message.records
            harvest.records += fresh
            on_tick(Tick(max(0.0, time.monotonic() - origin), fresh, sum(self._in_flight.values())))
        harvest.records.sort(key=lambda record: (record.intended, record.index))
        harvest.healths.sort(key=lambda health: health.worker)
        return harvest

    def _tell(self, command: ToWorker) -> None:
        for channel in self._channels:
            channel.send(command)

    def _readable(self, channels: set[Channel]) -> list[Channel]:
        ready = wait(list(channels), timeout=_POLL_SECONDS)
        return [channel for channel in channels if channel in ready]

    @staticmethod
    def _heard(channel: Channel) -> FromWorker:
        try:
            return channel.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerDied("a worker process ended without its report; its own error is above") from None
