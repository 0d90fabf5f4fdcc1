"""The gateway's own placement as a replay's router. Everything that the gateway's classes want is made here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.config import AdmissionConfig, HealthConfig, RoutingConfig
from gateway.request import Ask, Usage
from gateway.routing.cache_view import HitAccuracy, Hits
from gateway.routing.cost import CostModel
from gateway.routing.estimates import Calibrations, Estimates, Learning
from gateway.routing.exact_index import ExactIndex
from gateway.routing.policy import Affinity, LeastLoadedPolicy, Policy, PrefixPolicy, RoundRobinPolicy
from gateway.routing.prefix_index import PrefixIndex
from gateway.scheduling.output_length import OutputLengths
from gateway.scheduling.scheduler import Binding, Knobs, Placement
from gateway.scheduling.wait_queue import Queue, Ticket
from loadtest.replay.admission import GATEWAY, Admission
from loadtest.replay.engine import ReplayEngine
from loadtest.replay.fleet import fleet
from loadtest.replay.request import ReplayRequest
from loadtest.replay.router import Sending
from loadtest.replay.scenario import Scenario

_MODEL = "replayed"
_BYTES_PER_TOKEN = 4  # prompts have no text here; sizes are told as if they had
_NO_BOUND = 1 << 62  # everybody waits as long as it takes, so that all policies answer the same requests
_NO_WINDOW_SECONDS = 1e9
_PASSING_SECONDS = 0.1  # between two looks at how far streams are
_TOLD_TOKENS = 8  # of a stream, since it was told last; the gateway counts as many before it tells again
_NO_LEDGER = 1e9  # a share of the KV cache that is never filled


class PoolBlocks(ExactIndex):
    """What KV events would tell, without their delay: the blocks in the engines' own pools."""

    def __init__(self, engines: Sequence[ReplayEngine]) -> None:
        super().__init__()
        self._pools = [engine.scheduler.pool for engine in engines]
        for index in range(len(engines)):
            self.set_live(index, live=True)

    def depths(self, keys: Sequence[int]) -> list[int]:
        """Leading blocks that each engine's cache holds."""
        return [len(pool.find(keys, len(keys))) for pool in self._pools]


class GatewayRouter:
    """Requests go through `Placement` and its line, and their usage is learned from, as in the gateway."""

    def __init__(
        self,
        policy: str,
        scenario: Scenario,
        engines: Sequence[ReplayEngine],
        block_tokens: int,
        routing: RoutingConfig,
        admission: Admission = GATEWAY,
        *,
        exact: bool = False,
    ) -> None:
        self._estimates, self._lengths = Estimates(), OutputLengths()
        model = CostModel(routing.seconds_per_prefill_token, routing.decode_weight, scenario.max_num_batched_tokens)
        calibration = Calibrations(model, routing.prefill_window_seconds if admission.window else _NO_WINDOW_SECONDS)
        capacity = int(scenario.kv_tokens * routing.index_capacity_factor * _BYTES_PER_TOKEN)
        index, trust = PrefixIndex([capacity] * scenario.engines), HitAccuracy()
        self._learning = Learning(self._estimates, index, trust)
        self._queue = Queue(_NO_BOUND, _NO_BOUND)
        cap = admission.cap(scenario.max_num_seqs)
        self._engines = engines
        self._backends = fleet(
            scenario.engines, cap, scenario.kv_tokens, block_tokens, scenario.speeds(), adaptive=admission.adaptive,
            itl_objective_seconds=scenario.itl_objective_seconds,
        )  # fmt: skip
        self.scrape_seconds = HealthConfig().probe_interval_seconds if admission.adaptive else math.inf
        headroom = AdmissionConfig().kv_headroom if admission.ledger else _NO_LEDGER
        knobs = Knobs(routing.aging, headroom, routing.scan, routing.starvation_seconds)
        hits = Hits(index, trust, PoolBlocks(engines) if exact else None)
        serving = {_MODEL: [backend.engine for backend in self._backends]}
        chosen = _policy(policy, calibration, hits, self._estimates)
        self.placement = Placement(serving.get, chosen, self._queue, self._lengths, calibration, knobs)
        self._block_tokens = block_tokens
        self._tells_tokens = exact
        self._asks: dict[int, tuple[ReplayRequest, Ask, Binding]] = {}  # by the request's number
        self._passed_seconds = 0.0
        self._tickets: dict[Ticket, ReplayRequest] = {}
        self._changed = False  # since the last look through the line

    @property
    def waiting(self) -> int:
        return len(self._tickets)

    def arrived(self, request: ReplayRequest, now: float) -> list[Sending]:
        """Bound at once, or in the line."""
        self._pass(now)
        ask = self._ask(request)
        placed = self.placement.place(ask, now)
        if isinstance(placed, Binding):
            return [self._bound(request, ask, placed)]
        self._tickets[placed] = request
        self._changed = True
        return []

    def first_token(self, request: ReplayRequest, now: float) -> None:
        """As the gateway sees it pass."""
        self.placement.first_token(self._asks[request.number][2], now)
        self._changed = True

    def finished(self, request: ReplayRequest, now: float) -> None:
        """The lease is given back, and the answer's usage learned."""
        _, ask, binding = self._asks.pop(request.number)
        served = request.prompt_tokens - request.cached_tokens + request.output_tokens
        self.placement.release(binding, now, answered=True, served_tokens=served)
        self._changed = True
        usage = Usage(request.prompt_tokens, request.output_tokens, request.cached_tokens)
        self._backends[binding.engine.index].answered(request, now)
        self._lengths.answered(ask, usage)
        self._learning.answered(ask, binding.engine.index, binding.hit_tokens, usage)

    def scraped(self, now: float) -> None:
        """Limits follow what the engines' metrics show."""
        moved = [backend.scraped(engine, now) for backend, engine in zip(self._backends, self._engines, strict=True)]
        if any(moved):
            self.placement.refresh()
            self._changed = True

    def settle(self, now: float, *, is_look: bool) -> list[Sending]:
        """Look through the line once for all that changed, or because time alone opens engines too."""
        sendings: list[Sending] = []
        if not self._tickets or not (self._changed or is_look):
            return sendings
        self._changed = False
        self._pass(now)
        for ticket, granted in self.placement.drain(_MODEL, now):
            request = self._tickets.pop(ticket)
            if not isinstance(granted, Binding):
                raise granted
            sendings.append(self._bound(request, ticket.ask, granted))
        return sendings

    def _pass(self, now: float) -> None:
        """Tokens have passed to the clients."""
        if now - self._passed_seconds < _PASSING_SECONDS:
            return
        self._passed_seconds = now
        for engine in self._engines:
            engine.catch_up(now)
        for request, _, binding in self._asks.values():
            if request.sequence is not None:
                generated = self._engines[request.engine].scheduler.generated_tokens(request.sequence)
                if (more := generated - binding.reservation.came_tokens) >= _TOLD_TOKENS:
                    binding.engine.kv.on_tokens(binding.reservation, more)

    def _bound(self, request: ReplayRequest, ask: Ask, binding: Binding) -> Sending:
        self._asks[request.number] = request, ask, binding
        return request, binding.engine.index

    def _ask(self, request: ReplayRequest) -> Ask:
        step = self._block_tokens * _BYTES_PER_TOKEN
        return Ask(
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


def _policy(name: str, calibration: Calibrations, hits: Hits, estimates: Estimates) -> Policy:
    if name == "prefix":
        return PrefixPolicy(calibration, hits, estimates, Affinity())
    return LeastLoadedPolicy() if name == "least_loaded" else RoundRobinPolicy()
