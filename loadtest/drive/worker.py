"""A worker process: warms up, drives its share of the load, reports finished requests 4 times a second.

It also measures itself: how late its event loop runs and how much of its core it uses.
"""

from __future__ import annotations

import asyncio
import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Self

import uvloop

from loadtest.drive.capacity import Capacity, files_of, raise_file_limit, token_events_per_second
from loadtest.drive.client import open_session
from loadtest.drive.driver import Driver
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record, WorkerHealth

_LAG_INTERVAL_SECONDS = 0.01
_CPU_INTERVAL_SECONDS = 1.0


async def watch_health(health: WorkerHealth, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
    """Samples until cancelled. A lag is how much later than asked a 10 ms sleep ends; a share is CPU s per wall s."""
    window_start, window_cpu = clock(), cpu_clock()
    try:
        while True:
            due = clock() + _LAG_INTERVAL_SECONDS
            await asyncio.sleep(_LAG_INTERVAL_SECONDS)
            now = clock()
            health.loop_lags_seconds.append(max(0.0, now - due))
            if now - window_start >= _CPU_INTERVAL_SECONDS:
                cpu = cpu_clock()
                health.cpu_shares.append((cpu - window_cpu) / (now - window_start))
                window_start, window_cpu = now, cpu
    finally:
        # A run shorter than a window still reports its share.
        if not health.cpu_shares and clock() > window_start:
            health.cpu_shares.append((cpu_clock() - window_cpu) / (clock() - window_start))


@dataclass(frozen=True, slots=True)
class Start:
    """Parent to worker: begin; `origin` is the run's zero on the machine's monotonic clock."""

    origin: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent to worker: end now, give up what is in flight, and report."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker to parent: warmed up, waiting for the start."""

    warmup: list[Record]
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class FinishedRequests:
    """Worker to parent: the requests that ended since the last one."""

    worker: int
    records: list[Record]
    in_flight: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Worker to parent: nothing follows. `failure`: the error that ended it before its time, if any."""

    health: WorkerHealth
    itl_ticks: Counter[int] = field(default_factory=Counter)
    failure: str = ""


FromWorker = Ready | FinishedRequests | Finished
ToWorker = Start | Stop

if TYPE_CHECKING:
    Channel = Connection[FromWorker, ToWorker]


class Pipe:
    """Reads and writes in threads of its own; leaving the block waits until everything is written.

    The event loop must not watch the channel: uvloop would make it non-blocking, and a message that is larger than
    the socket's buffer would then fail halfway. Nor may it write: it would stand still while the parent is busy.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._inbox: asyncio.Queue[ToWorker | None] = asyncio.Queue()
        self._outbox: SimpleQueue[FromWorker | None] = SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._writer = Thread(target=self._write, daemon=True)

    def __enter__(self) -> Self:
        self._reader.start()
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The reader ends with the parent's end of the pipe.
        self._outbox.put(None)
        self._writer.join()

    def send(self, message: FromWorker) -> None:
        """Queues a message. It must not change afterwards."""
        self._outbox.put(message)

    async def receive(self) -> ToWorker | None:
        """Returns the parent's next message; None if the parent is gone."""
        return await self._inbox.get()

    def _read(self) -> None:
        message: ToWorker | None = None
        try:
            while True:
                message = self._received()
                self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)
                if message is None:
                    return
        except RuntimeError:
            return  # the loop has ended

    def _received(self) -> ToWorker | None:
        try:
            return self._channel.recv()
        except (EOFError, OSError):
            return None

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._channel.send(message)
            except OSError:
                return  # the parent is gone, as the reader finds too


_REPORT_INTERVAL_SECONDS = 0.25
# Collections of young objects by the default threshold cost more than they free here, and show as loop lag.
_GC_THRESHOLD = 20_000


def work(channel: Channel, plan: Plan, worker: int) -> None:
    """Entry point of the process. A parent that has gone ends it silently."""
    open_files = raise_file_limit(files_of(plan, worker))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, Pipe(channel, runner.get_loop()) as pipe:
        runner.run(_work(pipe, plan, worker, open_files))


class _Clock:
    """Seconds from an origin that is moved once, when the run starts."""

    def __init__(self) -> None:
        self.origin = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self.origin


async def _work(pipe: Pipe, plan: Plan, worker: int, open_files: int) -> None:
    capacity = Capacity(await token_events_per_second(), open_files)
    async with open_session(plan) as session:
        clock = _Clock()
        ended: list[Record] = []
        driver = Driver(plan, worker, session, clock=clock, emit=ended.append)
        warmed = await driver.warm_up()
        _settle_memory()
        pipe.send(Ready(warmed, capacity))
        start = await pipe.receive()
        if not isinstance(start, Start):
            return
        clock.origin = start.origin
        health = WorkerHealth(worker)

        def report() -> None:
            pipe.send(FinishedRequests(worker, ended.copy(), driver.in_flight))
            ended.clear()

        failure = ""
        try:
            await _until_stopped(pipe, _measure(driver, health, clock, report))
        except Exception as error:
            # The parent reports what was measured until here.
            traceback.print_exc()
            failure = _shown(error)
        report()
        pipe.send(Finished(health, driver.itl_ticks, failure))


async def _until_stopped(pipe: Pipe, measured: Coroutine[None, None, None]) -> None:
    """Runs to the end, or until the parent sends a message or is gone."""
    loop = asyncio.get_running_loop()
    measuring, stopped = loop.create_task(measured), loop.create_task(pipe.receive())
    await asyncio.wait({measuring, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    measuring.cancel()
    await asyncio.wait({measuring})
    if not measuring.cancelled():
        measuring.result()


async def _measure(
    driver: Driver, health: WorkerHealth, clock: Callable[[], float], report: Callable[[], None]
) -> None:
    await asyncio.sleep(max(0.0, -clock()))
    async with asyncio.TaskGroup() as group:
        watching = [
            group.create_task(watch_health(health, clock, time.process_time)),
            group.create_task(_report_regularly(report)),
        ]
        try:
            await driver.run()
        finally:
            for task in watching:
                task.cancel()


async def _report_regularly(report: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_REPORT_INTERVAL_SECONDS)
        report()


def _shown(error: BaseException) -> str:
    """The first cause in groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _settle_memory() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
