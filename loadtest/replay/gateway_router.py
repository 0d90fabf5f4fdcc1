"""The gateway's own placement as a replay's router, with simulated backends.

Admission arms differ in their limits on engines; placement and routing are the same in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from gateway.config import AdmissionConfig, HealthConfig, RoutingConfig
from gateway.core.backends.backend import SLOW_START_SHARE, KvCacheSize, held_tokens
from gateway.core.backends.concurrency_limit import Limiter
from gateway.core.backends.facts import Telemetry
from gateway.core.feedback import Learning
from gateway.core.request import Demand, Usage
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibrations, CostModel, Estimates, OutputLengths
from gateway.core.routing.policy import (
    Affinity,
    HitPredictor,
    LeastLoadedPolicy,
    Policy,
    PrefixPolicy,
    RoundRobinPolicy,
)
from gateway.core.scheduling.scheduler import Lease, Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue, Ticket
from gateway.features.exact.caches import KnownBlocks
from loadtest.replay.engine import ReplayEngine, ReplayRequest, Sending
from loadtest.replay.scenario import Misleading, Scenario


@dataclass(slots=True)
class ModelledBackend:
    """An engine, and its adaptive limit where it has one; always up."""

    engine: Engine
    limiter: Limiter | None = None
    misleading: Misleading = field(default_factory=Misleading)
    _: KW_ONLY
    kv_cache: KvCacheSize = field(default_factory=KvCacheSize)
    joined_seconds: float = -math.inf

    def join(self, now: float) -> None:
        """It comes while others serve: with an adaptive limit it starts slowly, as a backend of the gateway does."""
        self.joined_seconds = now
        self.engine.resize(self._limit(now), self.engine.kv_cache_tokens)

    def _limit(self, now: float) -> int:
        """Sequences that may be in flight now: the adaptive limit, less during a slow start."""
        cap = self.engine.cap
        if self.limiter is None:
            return cap
        started = min(1.0, (now - self.joined_seconds) / HealthConfig().slow_start_seconds)
        share = SLOW_START_SHARE + (1 - SLOW_START_SHARE) * started
        return min(self.limiter.limit, max(1, int(cap * share)))

    def scraped(self, modelled: ReplayEngine, now: float) -> bool:
        """Apply the engine's current metrics; True if sizes changed."""
        if self.limiter is None:
            return False
        scheduler, engine = modelled.scheduler, self.engine
        look = Telemetry(
            at_seconds=now,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + self.misleading.waiting,
            preemptions=scheduler.counters.preemptions + int(self.misleading.preemptions * now),
            kv_usage=scheduler.pool.num_used / scheduler.pool.num_blocks,
            in_flight=engine.load.in_flight,
            sent=engine.placed,
            behind_prefill=engine.load.behind_prefill(now),
        )
        self.kv_cache.observe(held_tokens([engine]), look.kv_usage)
        self.limiter.observe(look)
        limit = self._limit(now)
        if limit == engine.slots and self.kv_cache.tokens == engine.kv_cache_tokens:
            return False
        engine.resize(limit, self.kv_cache.tokens)
        return True

    def answered(self, request: ReplayRequest, now: float) -> None:
        """An answer was streamed to its end."""
        if self.limiter is not None and (tpot := request.tpot_seconds) is not None:
            self.limiter.streamed(tpot, request.first_token_seconds, now)


def fleet(
    engines: int,
    cap: int,
    kv_cache_tokens: int,
    block_tokens: int,
    speeds: tuple[float, ...],
    *,
    adaptive: bool = False,
    itl_objective_seconds: float | None = None,
    misleading: Misleading | None = None,
) -> list[ModelledBackend]:
    """As many backends as there are engines; `speeds` are their relative step times."""
    backends = []
    for index in range(engines):
        engine = Engine(index, f"engine-{index}", slowness=speeds[index] ** 0.5)
        engine.configure(cap, block_tokens, caches_prefixes=True)
        engine.resize(cap, kv_cache_tokens)
        limiter = Limiter(itl_objective_seconds=itl_objective_seconds) if adaptive else None
        if limiter is not None:
            limiter.bind(cap, 1)
        backend = ModelledBackend(engine, limiter, misleading or Misleading())
        backend.kv_cache.report(kv_cache_tokens)
        backends.append(backend)
    return backends


_NO_LIMIT = 1 << 20  # sequences
_SEPARATOR = ", "


@dataclass(frozen=True, slots=True)
class Admission:
    """The gateway's bounds in effect. `limit` is of sequences on each engine; None = the engine's own.

    `ledger`: KV cache is reserved; `adaptive`: the limit follows the engine's metrics.
    """

    name: str
    limit: int | None = None
    _: KW_ONLY
    ledger: bool = False
    adaptive: bool = False

    def cap(self, max_num_seqs: int) -> int:
        """The most concurrent sequences of each engine."""
        return max_num_seqs if self.limit is None else self.limit


NONE = Admission("none", _NO_LIMIT)
SLOTS = Admission("slots")
LEDGER = Admission("ledger", ledger=True)
LIMITER = Admission("limiter", adaptive=True)
GATEWAY = Admission("adaptive", ledger=True, adaptive=True)
_NAMED = {arm.name: arm for arm in (NONE, SLOTS, LEDGER, LIMITER, GATEWAY)}
WAYS = (*_NAMED, "static:N")


def admission_of(name: str) -> Admission:
    """The arm of that name. Raises ValueError."""
    kind, colon, limit = name.partition(":")
    if kind == "static" and colon and limit.isdecimal() and int(limit) > 0:
        return Admission(name, int(limit))
    if name not in _NAMED:
        raise ValueError(f"--admission: {name!r} unknown; there are {', '.join(WAYS)}")
    return _NAMED[name]


def with_admission(policy: str, arm: str) -> str:
    """The name of a gateway policy under an arm of admission."""
    return f"{policy}{_SEPARATOR}{arm}"


def parted(name: str) -> tuple[str, Admission | None]:
    """Policy and arm of a name; None where the name has no arm."""
    policy, _, arm = name.partition(_SEPARATOR)
    return policy, admission_of(arm) if arm else None


_MODEL = "replayed"
_BYTES_PER_TOKEN = 4  # prompts have no text here; sizes are stated as for texts
_NO_BOUND = 1 << 62  # requests wait without a limit, so that all policies answer the same requests
_PASSING_SECONDS = 0.1  # between two looks at how far streams are
_REPORTED_TOKENS = 8  # of a stream, since the last report; the gateway counts as many before it reports again
_NO_LEDGER = 1e9  # a share of the KV cache that is never filled


class PoolBlocks:
    """The contents of KV events without their delay: the blocks in the engines' own pools."""

    def __init__(self, engines: Sequence[ReplayEngine]) -> None:
        self._pools = [engine.scheduler.pool for engine in engines]

    def live(self, engine: int) -> bool:  # noqa: ARG002
        """Each engine's blocks are known at any time."""
        return True

    def depths(self, keys: Sequence[int]) -> list[int]:
        """Leading blocks that each engine's cache holds."""
        return [len(pool.find(keys, len(keys))) for pool in self._pools]


class GatewayRouter:
    """Requests go through `Scheduler` and its line, and their usage is learned from, as in the gateway."""

    def __init__(
        self,
        policy: str,
        scenario: Scenario,
        *,
        engines: Sequence[ReplayEngine],
        block_tokens: int,
        routing: RoutingConfig,
        admission: Admission = GATEWAY,
        exact: bool = False,
    ) -> None:
        self._estimates, self._lengths = Estimates(), OutputLengths()
        model = CostModel(routing.seconds_per_prefill_token, routing.decode_weight, scenario.max_num_batched_tokens)
        calibration = Calibrations(model)
        self._bytes_per_kv_token = routing.index_capacity_factor * _BYTES_PER_TOKEN
        capacity = int(scenario.shown_kv_tokens * self._bytes_per_kv_token)
        self._index = index = PrefixIndex([capacity] * scenario.all_engines)
        hit_accuracy = HitAccuracy()
        self._learning = Learning(self._estimates, index, hit_accuracy)
        self._queue = Queue(_NO_BOUND, _NO_BOUND)
        cap = admission.cap(scenario.shown_max_num_seqs)
        self._engines = engines
        self._all = fleet(
            scenario.all_engines,
            cap=cap,
            kv_cache_tokens=scenario.shown_kv_tokens,
            block_tokens=block_tokens,
            speeds=scenario.told_speeds(),
            adaptive=admission.adaptive,
            itl_objective_seconds=scenario.itl_objective_seconds,
            misleading=scenario.faults.misleading,
        )
        self._backends = self._all[: scenario.engines]
        self.scrape_seconds = HealthConfig().probe_interval_seconds if admission.adaptive else math.inf
        headroom = AdmissionConfig().kv_headroom if admission.ledger else _NO_LEDGER
        settings = SchedulerSettings(
            routing.aging, headroom, scan=routing.scan, starvation_seconds=routing.starvation_seconds
        )
        hit_predictor = HitPredictor(index, hit_accuracy, KnownBlocks(PoolBlocks(engines)) if exact else None)
        chosen = _policy(policy, hit_predictor, self._estimates)
        self.scheduler = Scheduler(
            self._serving, chosen, queue=self._queue, lengths=self._lengths, calibrations=calibration, settings=settings
        )
        self._block_tokens = block_tokens
        self._tells_tokens = exact
        self._demands: dict[int, tuple[ReplayRequest, Demand, Lease]] = {}  # by the request's number
        self._passed_seconds = 0.0
        self._tickets: dict[Ticket, ReplayRequest] = {}
        self._changed = False  # since the last look through the line
        self.scraped(0.0)  # the gateway reads metrics before it sends requests

    @property
    def waiting(self) -> int:
        return len(self._tickets)

    def arrived(self, request: ReplayRequest, now: float) -> list[Sending]:
        """Bound at once, or in the line."""
        self._pass(now)
        demand = self._demand(request)
        placed = self.scheduler.place(demand, now)
        if isinstance(placed, Lease):
            return [self._bound(request, demand, placed)]
        self._tickets[placed] = request
        self._changed = True
        return []

    def first_token(self, request: ReplayRequest, now: float) -> None:
        """As the gateway sees it pass."""
        self.scheduler.first_token(self._demands[request.number][2], now)
        self._changed = True

    def finished(self, request: ReplayRequest, now: float) -> None:
        """The lease is given back, and the answer's usage learned."""
        _, demand, lease = self._demands.pop(request.number)
        usage = Usage(request.prompt_tokens, request.output_tokens, request.cached_tokens)
        lease.on_tokens(request.output_tokens - lease.streamed_tokens)
        lease.on_usage(usage)
        self.scheduler.release(lease, now, answered=True, served_tokens=lease.served_tokens)
        self._changed = True
        self._backends[lease.engine.index].answered(request, now)
        self._lengths.answered(demand, usage)
        self._learning.answered(demand, lease.engine.index, lease.hit_tokens, usage)

    def scraped(self, now: float) -> None:
        """Limits and sizes follow the engines' metrics."""
        moved = [backend.scraped(engine, now) for backend, engine in zip(self._backends, self._engines, strict=False)]
        if any(moved):
            for backend in self._backends:
                self._index.resize(backend.engine.index, int((backend.kv_cache.tokens or 0) * self._bytes_per_kv_token))
            self.scheduler.refresh()
            self._changed = True

    def joined(self, now: float) -> None:
        for backend in self._all[len(self._backends) :]:
            backend.join(now)
        self._backends = self._all
        self.scheduler.refresh()
        self._changed = True

    def settle(self, now: float, *, is_look: bool) -> list[Sending]:
        """Look through the line once for all that changed, or because time alone opens engines too."""
        sendings: list[Sending] = []
        if not self._tickets or not (self._changed or is_look):
            return sendings
        self._changed = False
        self._pass(now)
        for ticket, granted in self.scheduler.scan_queue(_MODEL, now):
            request = self._tickets.pop(ticket)
            if not isinstance(granted, Lease):
                raise granted
            sendings.append(self._bound(request, ticket.demand, granted))
        return sendings

    def _serving(self, model: str) -> Sequence[Engine] | None:
        return [backend.engine for backend in self._backends] if model == _MODEL else None

    def _pass(self, now: float) -> None:
        """Tokens have passed to the clients."""
        if now - self._passed_seconds < _PASSING_SECONDS:
            return
        self._passed_seconds = now
        for engine in self._engines:
            engine.catch_up(now)
        for request, _, lease in self._demands.values():
            if request.sequence is not None:
                generated = self._engines[request.engine].scheduler.generated_tokens(request.sequence)
                if (more := generated - lease.streamed_tokens) >= _REPORTED_TOKENS:
                    lease.on_tokens(more)

    def _bound(self, request: ReplayRequest, demand: Demand, lease: Lease) -> Sending:
        self._demands[request.number] = request, demand, lease
        return request, lease.engine.index

    def _demand(self, request: ReplayRequest) -> Demand:
        step = self._block_tokens * _BYTES_PER_TOKEN
        return Demand(
            _MODEL,
            keys=request.keys,
            edges=tuple(range(step, step * len(request.keys) + 1, step)),
            prompt_size=request.prompt_tokens * _BYTES_PER_TOKEN,
            prompt_tokens=request.prompt_tokens if request.believed_tokens is None else request.believed_tokens,
            output_tokens=request.max_tokens,
            turn=request.turn,
            turn_end=request.turn_end,
            token_keys=request.keys if self._tells_tokens else (),
            streams=True,
        )


def _policy(name: str, hit_predictor: HitPredictor, estimates: Estimates) -> Policy:
    if name == "prefix":
        return PrefixPolicy(hit_predictor, estimates, Affinity())
    return LeastLoadedPolicy() if name == "least_loaded" else RoundRobinPolicy()
