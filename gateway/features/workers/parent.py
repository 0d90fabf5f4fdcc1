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
from gateway.core.listeners import bind_all, ports_of
from gateway.core.observe.log import EventLog
from gateway.features.coordination.local_server import TableServer
from gateway.features.handover.systemd import notify_systemd, of_systemd
from gateway.features.workers.line import LineToWorker
from gateway.features.workers.place import STORE, WorkerPlace, keeps_batches
from gateway.features.workers.ports import WorkersPort
from gateway.features.workers.streams import shared, unbuffered

_STABLE_SECONDS: Final = 60.0  # a worker that ends sooner is started again later
_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.5, 30.0
_FAILED: Final = 1
_MEMORY_FOLDER: Final = "/dev/shm"  # writable where a container's root is not


def pause_seconds(failures: int) -> float:
    """How long to wait before a worker is started again; `failures`: how often it ended soon, one after another."""
    return 0.0 if failures <= 1 else min(_MOST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 2, 10))


class Workers:
    """The workers of one gateway, which run until `stop` is called. `announce` is called once all have served."""

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
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._lines: dict[int, LineToWorker] = {}
        self._have_served: set[int] = set()
        self._must_reload: set[int] = set()  # once they serve
        self._restarts = [0] * count
        self._log = structlog.get_logger("gateway")

    async def run(self) -> None:
        """Keep all workers running until they have been told to stop, and have ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._keep(number), name=f"worker_{number}")

    def stop(self) -> None:
        """Let all workers drain and end; at the second call, end them at once."""
        number = signal.SIGTERM
        if self._is_stopping.is_set():
            number, self.exit_code = signal.SIGKILL, _FAILED
        self._is_stopping.set()
        for process in self._running.values():
            _send(process, number)

    def reload(self) -> None:
        """Let all workers read the configuration again."""
        for number, process in self._running.items():
            if self._lines[number].is_serving:
                _send(process, signal.SIGHUP)
            else:
                self._must_reload.add(number)

    async def until_stopping(self) -> None:
        await self._is_stopping.wait()

    def serving(self) -> list[int]:
        """The numbers of the workers that serve."""
        return sorted(number for number, line in self._lines.items() if line.is_serving)

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("gateway_workers", "Workers of this gateway that serve.", len(self.serving()))
        restarts = CounterMetricFamily(
            "gateway_worker_restarts", "Restarts of a worker that ended.", labels=("worker",)
        )
        for number, count in enumerate(self._restarts):
            restarts.add_metric((str(number),), count)
        yield restarts

    async def _keep(self, number: int) -> None:
        failures = 0
        while not self._is_stopping.is_set():
            began = self._clock()
            code = await self._run(number)
            lived_seconds = self._clock() - began
            if self._is_stopping.is_set():
                return
            if number not in self._have_served:  # what keeps it from serving is for the operator
                self._log.error("worker_not_started", worker=number, exit_code=code)
                self.stop()
                self.exit_code = code if code > 0 else _FAILED
                return
            failures = failures + 1 if code and lived_seconds < _STABLE_SECONDS else int(code != 0)
            pause = pause_seconds(failures)
            self._restarts[number] += 1
            log = self._log.error if code else self._log.info  # without an error, it was told to end
            seconds = {"lived_seconds": round(lived_seconds, 1), "starts_again_in_seconds": pause}
            log("worker_ended", worker=number, exit_code=code, **seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._is_stopping.wait()

    async def _run(self, number: int) -> int:
        """Run one process of a worker; returns its exit code, or a signal as a negative number."""
        line = LineToWorker(partial(self._on_serving, number))
        with line.watched():
            place = self._place(number, line.other)
            environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
            try:
                process = await asyncio.create_subprocess_exec(
                    *sys.orig_argv, stdin=asyncio.subprocess.DEVNULL, env=environment | place.given(),
                    pass_fds=(line.other, *place.main),
                )  # fmt: skip
            except OSError as error:
                self._log.error("worker_not_started", worker=number, reason=str(error))
                return _FAILED
            line.given()
            self._running[number], self._lines[number] = process, line
            if self._is_stopping.is_set():
                _send(process, signal.SIGTERM)
            try:
                return await process.wait()
            finally:
                del self._running[number], self._lines[number]

    def _on_serving(self, number: int) -> None:
        if number in self._must_reload:
            self._must_reload.discard(number)
            _send(self._running[number], signal.SIGHUP)
        was_complete = len(self._have_served) == self._count
        self._have_served.add(number)
        if was_complete:
            self._log.info("worker_started", worker=number)
        elif len(self._have_served) == self._count:
            self._announce()


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        process.send_signal(number)


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
                    port = WorkersPort(name, folder, server.workers, serving=workers.serving, own=workers)
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
