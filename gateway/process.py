"""The life of the process: it takes over or starts cold, serves, reloads, hands over or drains, and stops."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import structlog
import uvloop

from gateway.app import Gateway
from gateway.config import Config
from gateway.core.listeners import Listeners, addresses_of, bind_all
from gateway.core.observe.log import EventLog
from gateway.core.resources import fitted, raise_limit
from gateway.core.supervisor import running
from gateway.core.threads import breather
from gateway.features.discovery.several_addresses import several_addresses
from gateway.features.handover.channel import address_of
from gateway.features.handover.conversation import Predecessor, Successor, take_over
from gateway.features.handover.ports import Ports
from gateway.features.handover.slots import SlotSharing
from gateway.features.handover.snapshot import SnapshotFolder
from gateway.features.handover.succession import Handover
from gateway.features.handover.systemd import notify_systemd, of_systemd
from gateway.features.keys.feature import KeysFeature
from gateway.features.operate.control import TAKES_OVER, Restart, RestartCheck
from gateway.features.operate.reload import FileWatch
from gateway.features.responses.feature import ResponsesFeature
from gateway.features.table import FEATURES, FeatureEntry
from gateway.features.workers.line import LineToParent
from gateway.features.workers.place import WorkerPlace
from gateway.features.workers.streams import shared, unbuffered

_IGNORED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Life:
    """One process, from its start to its end. `file`: of the configuration, if it has one; `parent`: of a worker."""

    def __init__(
        self,
        config: Config,
        load_config: Callable[[], Config],
        file: Path | None,
        *,
        parent: LineToParent | None = None,
    ) -> None:
        self._config, self._parent = config, parent
        self._load_config = load_config
        self._file = file
        self._snapshots = SnapshotFolder(breather())
        self._log = structlog.get_logger("gateway")
        self._stop = asyncio.Event()
        self._hangups = asyncio.Event()
        server = config.server
        given = os.environ.pop(TAKES_OVER, "")
        name = file if parent is None else parent.place.name
        self._address = address_of(name, server.host, server.port)  # where the next process finds this one
        takes_over = parent is not None or (file is not None and server.port)
        coordination = config.coordination
        self._table = f"{coordination.url} {coordination.name}" if coordination.url else ""
        self._former = bytes.fromhex(given) if given else self._address if takes_over else None

    async def live(self, out: BinaryIO, log: EventLog) -> None:
        """Serve until a signal to stop, or until another process has taken over. Raises OSError or TakeoverRefused."""
        self._heed_signals()
        successor = await take_over(self._former, self._table) if self._former else None
        try:
            listeners = await bind_all(self._config.server, self._inherited(successor))
            known = await successor.snapshot() if successor else await self._snapshots.load(self._config.state.path)
            features: Sequence[FeatureEntry] = FEATURES
            if self._parent is not None and (path := self._parent.place.batches_elsewhere):
                from gateway.features.workers.batches import ForwardedFeature

                features = (
                    *features,
                    FeatureEntry("forwarded_batches", partial(ForwardedFeature, path), lambda _: True),
                )
            build = partial(Gateway, self._config, out, log=log, load=self._load_config, features=features)
            gateway = self._with_knowledge(build, known, same_engines=successor is not None) if known else build()
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: gateway.core.supervisor.on_loop_error(context)
            )
            await self._run(gateway, listeners, successor)
        finally:
            if successor is not None:
                successor.close()
        self._log.info("stopped")

    def _inherited(self, successor: Successor | None) -> Listeners:
        server = self._config.server
        if successor is not None:
            if self._parent is not None:
                self._parent.place.close()
            return successor.listeners(server)
        return of_systemd(os.environ) if self._parent is None else self._parent.place.listeners(server)

    def _with_knowledge(self, build: Callable[..., Gateway], known: dict[str, Any], *, same_engines: bool) -> Gateway:
        """A gateway that begins with a snapshot; one without it if it cannot be used."""
        try:
            gateway = build(secret=known["secret"])
            gateway.knowledge.restore(known, same_engines=same_engines)
        except Exception as error:
            self._log.exception("snapshot_ignored", reason=f"it cannot be used ({type(error).__name__})")
            return build()
        return gateway

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        self._on_stop(self._stop.set)
        for number in _IGNORED_SIGNALS:
            loop.add_signal_handler(number, partial(self._log.warning, "signal_ignored", signal=number.name))
        loop.add_signal_handler(signal.SIGHUP, self._hangups.set)

    def _on_stop(self, do: Callable[[], None] | None) -> None:
        """Set the effect of SIGTERM and Ctrl-C; None = they end the process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            if do is None:
                loop.remove_signal_handler(number)
            else:
                loop.add_signal_handler(number, do)

    def _stop_later(self) -> None:
        self._log.info("ending", hint="its last responses end first; a second signal cuts them")
        if self._parent is None:
            self._on_stop(None)

    async def _run(self, gateway: Gateway, listeners: Listeners, successor: Successor | None) -> None:
        core, operators = gateway.core, gateway.operators
        batches = gateway.features.get("batches")
        ports = Ports(
            gateway.server,
            operators.admin_port,
            operators.metrics_port,
            streams=operators.dashboard,
            batches=None if batches is None else batches.exclusive(),
        )
        lengths = core.cache_state.output_lengths
        sharing = SlotSharing(core.fleet, core.queue, lengths, kv_headroom=lambda: core.config.admission.kv_headroom)
        predecessor = Predecessor(
            gateway.knowledge,
            sharing=sharing,
            ports=ports,
            addresses=addresses_of(self._config.server),
            breathe=breather(),
            table=partial(self._table_now, gateway),
        )
        background = gateway.feature(ResponsesFeature).background
        handover = Handover(gateway, sharing, predecessor, background=background, successor=successor, stop=self._stop)
        if self._parent is None:
            restart = Restart(
                self._load_config, self._address, predecessor.began, successor_pid=lambda: predecessor.successor_pid
            )
            routes = restart.routes()
        else:
            routes = RestartCheck(self._load_config, self._config).routes()
        async with gateway.running(listeners, routes, handover.take_place) as admin_port:
            if successor is not None:
                successor.serves()
            self._log_start(gateway, admin_port)
            notify_systemd(os.environ, "READY=1")
            gc.collect()
            gc.freeze()
            async with handover.sharing_slots():
                async with self._serving(gateway), predecessor.waiting(self._address):
                    if self._parent is not None:
                        self._parent.serves()
                    await _first(self._stop.wait(), predecessor.began.wait())
                if predecessor.began.is_set():
                    self._on_stop(self._stop_later)
                    await handover.hand_over()
                    return
                if self._parent is None:  # else the parent sends, and the supervisor of both may send the same
                    self._on_stop(None)  # a second signal ends the process immediately
                notify_systemd(os.environ, "STOPPING=1")
                self._log.info("draining", answering=gateway.server.answering)
                await gateway.server.drain()
                await background.stop()  # so that the snapshot has their cost
                await handover.wait_for_before()
                await self._snapshots.save_last(gateway.core.config.state.path, gateway.knowledge)

    def _table_now(self, gateway: Gateway) -> str:
        """The table in which this process shares engines with others; empty = none, or it cannot be reached."""
        if not self._table:
            return ""
        from gateway.features.coordination.feature import CoordinationFeature

        return "" if gateway.feature(CoordinationFeature).coordinator.blocks.is_failing else self._table

    def _log_start(self, gateway: Gateway, admin_port: int | None) -> None:
        config, log = self._config, self._log
        for warning in config.upstream.warnings:
            log.warning("risky_setting", hint=warning)
        budgets = [key.name for key in gateway.feature(KeysFeature).client_keys.keys if key.has_budget]
        if budgets and config.state.path is None:
            log.warning("budgets_not_kept", keys=len(budgets), hint="set state.path: else a restart renews all budgets")
        log.info(
            "serving",
            host=config.server.host,
            port=gateway.server.port,
            admin_port=admin_port,
            backends=[each.name for each in gateway.core.fleet.backends],
            policy=config.routing.policy,
        )

    @asynccontextmanager
    async def _serving(self, gateway: Gateway) -> AsyncIterator[None]:
        """Background work during serving, until the process ends or hands over."""
        repeating = gateway.core.supervisor.repeating
        async with running(_warn_of_names(self._config)), AsyncExitStack() as stack:
            enter = stack.enter_async_context
            await enter(repeating("reload", partial(gateway.reloads.on_hangup, self._hangups), 1.0))
            if self._file is not None:
                watch = FileWatch(self._file, self._hangups.set, lambda: gateway.core.config.config.watch)
                await enter(repeating("config_watch", watch.step, 1.0))
            save = partial(self._snapshots.save_later, lambda: gateway.core.config.state.path, gateway.knowledge)
            await enter(repeating("snapshot", save, 1.0))
            yield


async def _first(*events: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.get_running_loop().create_task(event) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _warn_of_names(config: Config) -> None:
    for warning in await several_addresses(config.backends):
        structlog.get_logger("gateway").warning("backend_has_several_addresses", hint=warning)


def serve(config: Config, load_config: Callable[[], Config], file: Path | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C, then drain; `load_config` reads the configuration, from `file`, for a reload.

    Raises OSError if a port is in use, and TakeoverRefused.
    """
    for number in (signal.SIGHUP, *_IGNORED_SIGNALS):
        signal.signal(number, signal.SIG_IGN)  # until the event loop has handlers
    gc.set_threshold(50_000, 20, 50)  # requests make little garbage in cycles
    place = WorkerPlace.taken(os.environ)
    with unbuffered(sys.stdout) as out, unbuffered(sys.stderr) as errors:
        streams = (out, errors) if place is None else (shared(out), shared(errors))
        with EventLog(streams[1], worker=None if place is None else place.number) as log:
            log.apply(config.log.level, config.log.format)
            limit = raise_limit()

            def fitting(config: Config) -> Config:
                return fitted(config if place is None else place.applied(config), limit)

            life = partial(Life, fitting(config), lambda: fitting(load_config()), file)
            uvloop.run(_live(life, place, streams[0], log))


async def _live(life: Callable[..., Life], place: WorkerPlace | None, out: BinaryIO, log: EventLog) -> None:
    parent = None if place is None else LineToParent(place)
    with nullcontext() if parent is None else parent.watched():
        await life(parent=parent).live(out, log)
