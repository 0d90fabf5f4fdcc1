"""The parent of several workers: it binds the ports, serves the store that they share, and keeps the workers running.

It does nothing for a request. A worker that ends is started again; when the parent ends, the workers do.
"""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Final

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.config import Config
from gateway.core.errors import RestartFailed
from gateway.core.listeners import bind_all, ports_of
from gateway.core.observe.log import EventLog
from gateway.features.coordination.local_server import TableServer
from gateway.features.handover.systemd import notify_systemd, of_systemd
from gateway.features.workers.line import LineToWorker
from gateway.features.workers.place import STORE, WorkerPlace, keeps_batches
from gateway.features.workers.ports import Replaced, WorkersPort
from gateway.features.workers.streams import shared, unbuffered

_STABLE_SECONDS: Final = 60.0  # a worker that ends sooner is started again later
_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.5, 30.0
_FAILED: Final = 1
_MEMORY_FOLDER: Final = "/dev/shm"  # writable where a container's root is not


def pause_seconds(failures: int) -> float:
    """How long to wait before a worker is started again; `failures`: how often it ended soon, one after another."""
    return 0.0 if failures <= 1 else min(_MOST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 2, 10))


class WorkerProcess:
    """One process of a worker. `end` is its exit code, or a signal as a negative number."""

    def __init__(self, process: asyncio.subprocess.Process, line: LineToWorker) -> None:
        self.process, self.line = process, line
        self.end: asyncio.Task[int] = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> int:
        with self.line.watched():
            return await self.process.wait()

    async def has_served(self) -> bool:
        """Wait until it serves, or has ended."""
        serving = asyncio.get_running_loop().create_task(self.line.serving.wait())
        await asyncio.wait((serving, self.end), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        return self.line.serving.is_set()


class Workers:
    """The workers of one gateway, running until `stop` is called. `announce` is called once all have served.

    A new process replaces a worker, as a new gateway replaces its predecessor. The old one ends its streams; both
    divide the engines as two workers do.
    """

    def __init__(
        self,
        count: int,
        place: Callable[[int, int], WorkerPlace],
        announce: Callable[[], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        """`place`: of a worker, by its number and the descriptor of its line."""
        self.exit_code = 0
        self._count, self._place = count, place
        self._announce, self._clock = announce, clock
        self._is_stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._running: set[WorkerProcess] = set()  # including replaced ones, and their replacements
        self._current: dict[int, WorkerProcess] = {}
        self._replacing = [asyncio.Lock() for _ in range(count)]
        self._have_served: set[int] = set()
        self._must_reload: set[int] = set()  # once they serve
        self._restarts = [0] * count
        self._log = structlog.get_logger("gateway")

    async def run(self) -> None:
        """Keep all workers running until `stop` is called and they have ended."""
        async with self._group:
            for number in range(self._count):
                self._group.create_task(self._keep(number), name=f"worker_{number}")

    def stop(self) -> None:
        """Let all workers drain and end; at the second call, end them immediately."""
        number = signal.SIGTERM
        if self._is_stopping.is_set():
            number, self.exit_code = signal.SIGKILL, _FAILED
        self._is_stopping.set()
        for worker in self._running:
            _send(worker, number)

    def reload(self) -> None:
        """Let all workers read the configuration again."""
        for number, worker in self._current.items():
            if worker.line.is_serving:
                _send(worker, signal.SIGHUP)
            else:
                self._must_reload.add(number)

    async def replace(self, number: int) -> Replaced:
        """Replace the process of a worker by a new one, which takes over its place. Raises RestartFailed."""
        async with self._replacing[number]:
            former = self._current.get(number)
            if former is None or not former.line.is_serving or self._is_stopping.is_set():
                raise RestartFailed(f"Worker {number} does not serve, so nothing can take over from it. Retry later.")
            worker = await self._started(number)
            if worker is None or not await worker.has_served():
                how = "cannot be started" if worker is None else f"ended with exit code {worker.end.result()}"
                raise RestartFailed(
                    f"Worker {number} goes on as it was: the new process {how}. The log has the reason."
                )
            self._current[number] = worker
            self._group.create_task(self._keep(number, worker), name=f"worker_{number}")
            return Replaced(number, worker.process.pid, former.process.pid)

    async def until_stopping(self) -> None:
        await self._is_stopping.wait()

    def serving(self) -> list[int]:
        """The numbers of the workers that serve."""
        return sorted(number for number, worker in self._current.items() if worker.line.is_serving)

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("gateway_workers", "Workers of this gateway that serve.", len(self.serving()))
        restarts = CounterMetricFamily(
            "gateway_worker_restarts", "Restarts of a worker that ended.", labels=("worker",)
        )
        for number, count in enumerate(self._restarts):
            restarts.add_metric((str(number),), count)
        yield restarts

    async def _keep(self, number: int, worker: WorkerProcess | None = None) -> None:
        """Keep a worker running, from this process of it on, until another one has replaced it."""
        failures = 0
        while worker is not None or not self._is_stopping.is_set():
            began = self._clock()
            if worker is None and (worker := await self._started(number)) is not None:
                self._current[number] = worker
            code = _FAILED if worker is None else await worker.end
            lived_seconds = self._clock() - began
            async with self._replacing[number]:  # it may be about to be replaced
                if self._is_stopping.is_set() or self._current.get(number) is not worker:
                    return
                self._current.pop(number, None)
            worker = None
            if number not in self._have_served:  # errors that prevent serving are for the operator
                self._log.error("worker_not_started", worker=number, exit_code=code)
                self.stop()
                self.exit_code = code if code > 0 else _FAILED
                return
            failures = failures + 1 if code and lived_seconds < _STABLE_SECONDS else int(code != 0)
            pause = pause_seconds(failures)
            self._restarts[number] += 1
            log = self._log.error if code else self._log.info  # without an error, a signal ended it
            seconds = {"lived_seconds": round(lived_seconds, 1), "starts_again_in_seconds": pause}
            log("worker_ended", worker=number, exit_code=code, **seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._is_stopping.wait()

    async def _started(self, number: int) -> WorkerProcess | None:
        """A new process of a worker; None = it cannot be started."""
        line = LineToWorker(partial(self._on_serving, number))
        place = self._place(number, line.other)
        environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
        try:
            process = await asyncio.create_subprocess_exec(
                *sys.orig_argv, stdin=asyncio.subprocess.DEVNULL, env=environment | place.given(),
                pass_fds=(line.other, *place.main),
            )  # fmt: skip
        except OSError as error:
            line.close()
            self._log.error("worker_not_started", worker=number, reason=str(error))
            return None
        line.given()
        worker = WorkerProcess(process, line)
        self._running.add(worker)
        worker.end.add_done_callback(lambda _: self._running.discard(worker))
        self._group.create_task(_until(worker.end))
        if self._is_stopping.is_set():
            _send(worker, signal.SIGTERM)
        return worker

    def _on_serving(self, number: int) -> None:
        if number in self._must_reload:
            self._must_reload.discard(number)
            _send(self._current[number], signal.SIGHUP)
        was_complete = len(self._have_served) == self._count
        self._have_served.add(number)
        if was_complete:
            self._log.info("worker_started", worker=number)
        elif len(self._have_served) == self._count:
            self._announce()


async def _until(end: asyncio.Task[int]) -> None:
    await end


def _send(worker: WorkerProcess, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        worker.process.send_signal(number)


class Parent:
    """The process that starts the workers, from its start to its end."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._log = structlog.get_logger("gateway")

    async def live(self) -> int:
        """Serve until a signal to stop; returns the exit code. Raises OSError if a port is in use."""
        server, ports = self._config.server, dict[str, int]()
        listeners = await bind_all(server, of_systemd(os.environ))
        async with AsyncExitStack() as stack:
            stack.callback(listeners.close)
            folder = stack.enter_context(private_folder())
            if not self._config.coordination.url:
                store = TableServer(secrets.token_hex(8))
                await stack.enter_async_context(store.serving(os.path.join(folder, STORE)))
            main = tuple(each.fileno() for each in listeners.main)
            ports["port"] = listeners.main[0].getsockname()[1]
            keeps = keeps_batches(self._config)

            def place(number: int, line: int) -> WorkerPlace:
                return WorkerPlace(number, server.workers, folder=folder, line=line, main=main, keeps_batches=keeps)

            workers = Workers(server.workers, place, partial(self._announce, ports), clock=self._clock)
            for name, sockets in (("admin", listeners.admin), ("metrics", listeners.metrics)):
                if name in ports_of(server):
                    port = WorkersPort(name, folder, server.workers, workers=workers)
                    ports[f"{name}_port"] = await stack.enter_async_context(port.listening(sockets))
            stack.enter_context(self._heeding_signals(workers))
            async with asyncio.TaskGroup() as group:
                group.create_task(workers.run())
                await workers.until_stopping()
                notify_systemd(os.environ, "STOPPING=1")
                for each in listeners.main:
                    each.close()  # clients are refused once all workers have drained and closed theirs
        self._log.info("stopped")
        return workers.exit_code

    def _announce(self, ports: dict[str, int]) -> None:
        self._log.info("workers_serve", host=self._config.server.host, workers=self._config.server.workers, **ports)
        notify_systemd(os.environ, "READY=1")

    @contextmanager
    def _heeding_signals(self, workers: Workers) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        heeded = {signal.SIGTERM: workers.stop, signal.SIGINT: workers.stop, signal.SIGHUP: workers.reload}
        for number, act in heeded.items():
            loop.add_signal_handler(number, act)
        try:
            yield
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)


@contextmanager
def private_folder() -> Iterator[str]:
    """A folder for the sockets of this gateway, which other users cannot enter. Raises OSError."""
    try:
        folder = TemporaryDirectory(prefix="gateway-", ignore_cleanup_errors=True)
    except OSError:
        folder = TemporaryDirectory(prefix="gateway-", dir=_MEMORY_FOLDER, ignore_cleanup_errors=True)
    with folder as path:
        yield path


def serve(config: Config) -> int:
    """Start the workers of this configuration, and serve until they have ended. Raises OSError if a port is in use."""
    with unbuffered(sys.stderr) as errors, EventLog(shared(errors)) as log:
        log.apply(config.log.level, config.log.format)
        return asyncio.run(Parent(config, time.monotonic).live())
