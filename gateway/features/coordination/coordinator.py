"""Keeps this replica's blocks renewed: calls the store, and sets its slots and KV tokens on each engine."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog

from gateway.core.backends.fleet import Fleet
from gateway.core.observe.metrics import Metrics
from gateway.core.routing.engine import EngineUse
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.supervisor import TURN_SECONDS, Supervisor
from gateway.features.coordination.demand import Demands
from gateway.features.coordination.link import RedisLink
from gateway.features.coordination.redis_store import RedisStore
from gateway.features.coordination.replica import ReplicaBlocks
from gateway.features.coordination.sharing import CacheSharing
from gateway.features.coordination.store import StoreLost
from gateway.features.handover.slots import engines_by_key

_USUAL_SECONDS: Final = 1.0  # between two calls
_WAITING_SECONDS: Final = 0.2  # while requests wait: they take seconds, so blocks follow the demand
_ASKING_SECONDS: Final = 0.1  # between two requests for others' calls
_FRUITLESS_SECONDS: Final = 0.4  # while requests wait, and calls change no block
_LEAST_SECONDS: Final = 0.02  # after a call, regardless of others' requests
_ANSWER_SECONDS: Final = 0.003  # after a call that requested parts of others, which respond with a request
_ATTEMPTS: Final = 8  # at a change, while others change the table
_SHOWN: Final = 64  # characters of a name in the log
_READY_SECONDS: Final = 8.0  # until this replica has blocks, or serves with an even part


class Coordinator:
    """One replica's part in a fleet of several: its blocks, and the data shared with its peers.

    `counted` is called when the number of replicas has changed.
    """

    def __init__(
        self,
        link: RedisLink,
        *,
        blocks: ReplicaBlocks,
        sharing: CacheSharing,
        fleet: Fleet,
        demands: Demands,
        broker: LeaseBroker,
        counted: Callable[[], None],
        clock: Callable[[], float],
        supervisor: Supervisor,
    ) -> None:
        self.failures = 0  # calls that failed
        self.blocks, self.sharing = blocks, sharing
        self._link, self._store, self._calls = link, RedisStore(link), link.name("call")
        self._fleet, self._demands, self._broker = fleet, demands, broker
        self._counted, self._clock, self._supervisor = counted, clock, supervisor
        self._peers: frozenset[str] | None = None  # peers whose messages arrive
        self._parts: dict[int, EngineUse] = {}  # the last set limits, by the engine's number
        self._lacked: set[int] = set()  # numbers of engines of which a peer needs a part
        self._wake = asyncio.Event()
        self._has_ended_call = asyncio.Event()
        self._count = 1
        self._is_lost = self._has_asked = self._has_unread = False
        self._called_seconds = self._asked_seconds = -math.inf
        self._waiting_seconds = _WAITING_SECONDS
        self._log = structlog.get_logger("gateway")
        broker.when_used(self._on_wait, self._on_release)
        fleet.on_change.insert(0, self.obey)
        self.obey()

    def _on_call(self, names: bytes) -> None:
        if self._link.replica.encode() in names.split():
            self._wake.set()

    def _on_wait(self) -> None:
        """A request begins to wait: larger blocks may help, unless others wait in vain already."""
        if self._waiting_seconds == _WAITING_SECONDS and not self.blocks.is_failing:
            self._wake.set()

    def _on_release(self, engine: int) -> None:
        """A part of an engine became free without local demand; peers may need it."""
        if engine in self._lacked:
            self._wake.set()

    def obey(self, *, anew: bool = True) -> None:
        """Set the limits of each engine; without `anew`, only if they have changed."""
        now, parts = self._clock(), dict[int, EngineUse]()
        engines = list(engines_by_key((*self._fleet.backends, *self._fleet.leaving)))
        self._lacked = {engine.index for key, _, engine in engines if key in self.blocks.lacked}
        all_used: dict[str, int] = {}
        for key, _, engine in engines:
            all_used[key] = all_used.get(key, 0) + engine.load.in_flight
        for key, _, engine in engines:
            limit = self.blocks.limit(key, engine.whole, now)
            elsewhere = all_used[key] - engine.load.in_flight  # on a backend of the same URL, which leaves
            parts[engine.index] = EngineUse(max(0, limit.slots - elsewhere), limit.kv_tokens)
        until = self.blocks.lapses_seconds if self.blocks.is_current(now) else math.inf
        self._broker.lapse_at(until, self.obey)
        if anew or parts != self._parts:
            self._parts = parts
            self._fleet.grant(parts)
            self._broker.scan_soon()

    @asynccontextmanager
    async def taking_part(self) -> AsyncIterator[None]:
        """Take part while the block runs, once there are blocks; at its end, leave if nothing is in flight."""
        async with self._link.open():
            try:
                async with self._supervisor.repeating("coordination", self._step, _USUAL_SECONDS):
                    with self._supervisor.looking("coordination", self._look):
                        await self._ready()
                        yield
            finally:
                if not any(engine.load.in_flight for engine in self._fleet.engines()):
                    with suppress(StoreLost):
                        await self._leave()

    async def _ready(self) -> None:
        """Wait until this replica has blocks, or has found that the store cannot be reached."""
        until = self._clock() + _READY_SECONDS
        while self._clock() < until and not self._has_blocks():
            self._has_ended_call.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_USUAL_SECONDS):
                    await self._has_ended_call.wait()

    def _has_blocks(self) -> bool:
        if self.blocks.is_failing:
            return True
        now = self._clock()
        engines = engines_by_key(self._fleet.backends)
        return self.blocks.is_current(now) and all(
            self.blocks.limit(key, engine.whole, now).slots for key, _, engine in engines
        )

    async def _step(self) -> None:
        """Call once, and wait until it is time for the next call."""
        self._called_seconds = math.inf  # a call is under way
        await self.call()
        self._called_seconds = self._clock()
        await asyncio.sleep(_ANSWER_SECONDS if self._has_asked else _LEAST_SECONDS)
        await self._wake.wait()
        self._wake.clear()

    def _look(self) -> None:
        """Call when it is time, to the nearest turn of the timer."""
        pause_seconds = self._waiting_seconds if self._broker.waiting and not self.blocks.is_failing else _USUAL_SECONDS
        if self._clock() - self._called_seconds > pause_seconds - TURN_SECONDS / 2:
            self._wake.set()

    async def call(self) -> None:
        """Renew the blocks, and state the wishes. A failing store affects no request."""
        try:
            await self._exchange()
            await self._follow_peers()
        except Exception as error:  # after any error, blocks are not renewed
            if not isinstance(error, StoreLost):
                self._supervisor.caught("coordination", error)
            self.failures += 1
            self.blocks.failed()
            if not self._is_lost:
                self._is_lost = True
                self._log.warning(
                    "coordination_lost", reason=str(error) or type(error).__name__, replicas=self._count,
                    hint="blocks are used until they lapse, then an even part of each cap",
                )  # fmt: skip
        else:
            if self._is_lost:
                self._is_lost = False
                self._log.info("coordination_restored", replicas=self.blocks.live)
        finally:
            self.obey(anew=False)
            self._has_ended_call.set()
        if self.blocks.unread and not self._has_unread:
            self._log.warning(
                "replica_unreadable", replica=min(self.blocks.unread)[:_SHOWN], records=len(self.blocks.unread),
                hint="its record in the table is junk, or of another version; it keeps an even part of each cap",
            )  # fmt: skip
        self._has_unread = bool(self.blocks.unread)
        if self.blocks.live != self._count:
            self._count = self.blocks.live
            self._log.info("replicas_changed", replicas=self._count, silent=self.blocks.missing)
            self._counted()

    async def _exchange(self) -> None:
        blocks, clock = self.blocks, self._clock
        if not blocks.knows_table:
            blocks.saw(await self._store.read(), clock())
        for _ in range(_ATTEMPTS):
            sent = clock()
            change = blocks.propose(*self._demands.wishes(sent), sent)
            self.obey(anew=False)  # the part that the change gives up
            applied, table = await self._store.swap(change)
            blocks.answered(table, sent, clock(), applied=applied)
            if applied:
                break
        else:
            raise StoreLost("other gateways changed the table at the same time")
        is_fruitless = self._broker.waiting and not blocks.has_changed
        self._waiting_seconds = min(_FRUITLESS_SECONDS, 2 * self._waiting_seconds) if is_fruitless else _WAITING_SECONDS
        called, self._has_asked = blocks.poor, bool(blocks.rich) and clock() - self._asked_seconds > _ASKING_SECONDS
        if self._has_asked:
            self._asked_seconds = clock()
            called = blocks.poor | blocks.rich
        if called:
            self._link.publish(self._calls, " ".join(called).encode())

    async def _follow_peers(self) -> None:
        peers = self.blocks.peers
        if peers != self._peers:
            await self._link.listen({self._calls: self._on_call, **self.sharing.follow_peers(peers)})
            self._peers = peers

    async def _leave(self) -> None:
        for _ in range(_ATTEMPTS):
            self.blocks.saw(await self._store.read(), self._clock())
            change = self.blocks.leave()
            if change is None or (await self._store.swap(change))[0]:
                return

    def add_gauges(self, metrics: Metrics) -> None:
        metrics.gauge(
            "gateway_replicas", "Gateways that share the fleet, as last known.", (), lambda: [((), self.blocks.live)]
        )
        metrics.gauge(
            "gateway_silent_replicas",
            "Gateways that are cut off or paused; their parts of the caps are kept free.",
            (),
            lambda: [((), self.blocks.missing)],
        )
        metrics.gauge(
            "gateway_coordination_up",
            "Whether the parts of the caps are current (1), or even parts are used because Redis is lost (0).",
            (),
            lambda: [((), int(self.blocks.is_current(self._clock())))],
        )
        metrics.counter(
            "gateway_coordination_failures_total", "Failed calls of Redis.", (), lambda: [((), self.failures)]
        )
        self.sharing.add_gauges(metrics)
