"""The worker processes of a run, seen from the parent, and stopping them early on Ctrl-C or SIGTERM."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from loadtest.drive.capacity import Capacity
from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record, Tick
from loadtest.drive.worker import Finished, FinishedRequests, FromWorker, Ready, Start, Stop, ToWorker, work

if TYPE_CHECKING:
    Channel = Connection[ToWorker, FromWorker]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Inside the block the first signal is only noted; a second one interrupts as usual."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


_POLL_SECONDS = 0.1
_START_DELAY_SECONDS = 0.2
_END_GRACE_SECONDS = 5.0
_STOP_GRACE_SECONDS = 10.0
_EXIT_CODE_SECONDS = 1.0


class WorkerDied(Exception):
    """A worker process ended before anything was measured."""


class Stopped(Exception):
    """The user ended the run before anything was measured."""


class WorkerFleet:
    """Starts the workers on entry and leaves no process behind on exit."""

    def __init__(
        self, plan: Plan, should_stop: Callable[[], bool], *, stop_grace_seconds: float = _STOP_GRACE_SECONDS
    ) -> None:
        self._plan = plan
        self._should_stop = should_stop
        self._stop_grace_seconds = stop_grace_seconds
        self._channels: list[Channel] = []
        self.processes: list[BaseProcess] = []
        self._in_flight: dict[int, int] = {}
        self.capacities: list[Capacity] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        # A signal may reach the whole process group: workers inherit that it is ignored; the parent notifies them.
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + (_END_GRACE_SECONDS if kind is None else 0.0)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def warm_up(self) -> list[Record]:
        """Waits until every worker has warmed up; returns their warm-up requests, which count for nothing else.

        Raises WorkerDied.
        """
        warmup: list[Record] = []
        waiting = set(self._channels)
        while waiting:
            if self._should_stop():
                raise Stopped
            for channel in self._readable(waiting):
                message = self._received(channel)
                if message is None:
                    raise WorkerDied(f"{self._end_of(channel)} before the run began; its own error is above")
                assert isinstance(message, Ready)
                warmup += message.warmup
                self.capacities.append(message.capacity)
                waiting.discard(channel)
        return warmup

    def measure(self, on_tick: Callable[[Tick], None]) -> Harvest:
        """Runs the measured part to its end, or until the user stops it or a worker is lost.

        The load without one of its workers is not the one that was planned, so the others are stopped; what all of
        them have reported is kept.
        """
        origin = time.monotonic() + _START_DELAY_SECONDS
        harvest = Harvest(origin=origin)
        self._tell(Start(origin))
        running = set(self._channels)
        given_up_at: float | None = None
        while running:
            if self._should_stop():
                harvest.stop()
            if given_up_at is None and harvest.is_given_up:
                given_up_at = time.monotonic() + self._stop_grace_seconds
                self._tell(Stop())
            fresh: list[Record] = []
            for channel in self._readable(running):
                message = self._received(channel)
                if isinstance(message, FinishedRequests):
                    self._in_flight[message.worker] = message.in_flight
                    fresh += message.records
                    continue
                running.discard(channel)
                self._take_end(harvest, channel, message)
            if given_up_at is not None and time.monotonic() > given_up_at:
                late = f"did not report within {self._stop_grace_seconds:g} s of being stopped"
                harvest.lost.extend(f"client worker {self._channels.index(channel)} {late}" for channel in running)
                running.clear()
            harvest.records.extend(fresh)
            on_tick(Tick(max(0.0, time.monotonic() - origin), fresh, sum(self._in_flight.values())))
        return harvest.complete()

    def _take_end(self, harvest: Harvest, channel: Channel, message: FromWorker | None) -> None:
        """The last message of a worker, or None if its process ended without one."""
        self._in_flight.pop(self._channels.index(channel), None)
        if not isinstance(message, Finished):
            harvest.lost.append(f"{self._end_of(channel)}; what it measured last is missing")
            return
        harvest.take(message.health, message.itl_ticks, message.failure)

    def _tell(self, command: ToWorker) -> None:
        for channel in self._channels:
            with suppress(OSError):  # a process that has ended is found where it is read from
                channel.send(command)

    def _readable(self, channels: set[Channel]) -> list[Channel]:
        ready = wait(list(channels), timeout=_POLL_SECONDS)
        return [channel for channel in channels if channel in ready]

    @staticmethod
    def _received(channel: Channel) -> FromWorker | None:
        """None where the process has ended, in the middle of a message or before it."""
        try:
            return channel.recv()
        except (EOFError, OSError):
            return None

    def _end_of(self, channel: Channel) -> str:
        worker = self._channels.index(channel)
        process = self.processes[worker]
        process.join(_EXIT_CODE_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            return f"client worker {worker} was killed by signal {-code}"
        return f"client worker {worker} ended" + ("" if code is None else f" with exit code {code}")
