"""One engine of a backend: its sizes, its load, and the cost of placing a request there. Pure.

A backend runs one engine, or several (data parallel), each with a KV cache and slots of its own. The fleet makes the
engines and sets their sizes; placement changes their load.

The marginal cost, in seconds, of placing one request on one engine:

cost = prefill ahead of it + its own uncached prefill, which also stalls the sequences that decode there
     + as much again for the cache that it takes there, because blocks that would have been hit are evicted
     + engine steps it waits for + how much it slows decoding down, its own and theirs
     + time until enough KV cache is free + time until a slot is free + time to load its adapter
"""

import math
from bisect import bisect_left, insort
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

from gateway.core.routing.adapters import AdapterSlots
from gateway.core.routing.estimates import Calibration, CostModel
from gateway.core.routing.kv_reservations import KvLedger, Reservation

# Averaging time of the prefill share: about the duration of an answer.
MEMORY_SECONDS: Final = 10.0
_LONG_SECONDS: Final = 0.5  # of a prefill: about two full engine steps. Requests behind it wait visibly long


class OtherLoad(NamedTuple):
    """The load of other gateways on an engine, some tens of milliseconds old, in the units of `EngineLoad`."""

    in_flight: int
    decoding: int
    context_tokens: int
    ahead_seconds: float  # prefill
    prefill_share: float  # of recent time


@dataclass(slots=True, eq=False, repr=False)
class EngineLoad:
    """Requests in flight on one engine: those still in prefill, in order, and those decoding.

    `others` affects costs only. Admission depends on the gateway's own requests, and on its part (`Engine.share`).
    """

    changes: int = 0  # number of changes so far
    _: KW_ONLY
    in_flight: int = 0  # sequences
    decoding: int = 0  # sequences with a first token
    pooled: int = 0  # sequences in flight that never decode: embeddings, scores
    context_tokens: int = 0  # in flight: prompts, and streamed parts of answers
    pending: dict[Reservation, None] = field(default_factory=dict)  # in prefill, oldest first
    _pending_seconds: float = 0.0
    _head_since: float = 0.0
    recent_share: float = 0.0  # of recent time spent in prefill, as predicted when requests were sent; with others'
    share_at: float = 0.0
    others: OtherLoad | None = None
    _others_at: float = 0.0

    def __repr__(self) -> str:
        return f"<EngineLoad {self.in_flight} in flight, {self.decoding} decoding, {self.context_tokens} tokens>"

    def start(self, request: Reservation, now: float) -> None:
        self.changes += 1
        self.in_flight += request.sequences
        self.pooled += request.sequences if request.demand.divisible else 0
        self.context_tokens += request.demand.prompt_tokens
        request.started_seconds = now
        pending = self.pending
        if not pending:
            self._head_since = now
            request.alone = self.others is None or self.others.ahead_seconds <= 0.0
        elif len(pending) == 1:
            next(iter(pending)).alone = False
        pending[request] = None
        self._pending_seconds += request.prefill_seconds
        self.recent_share = self.prefill_share(now) + request.prefill_seconds / MEMORY_SECONDS
        self.share_at = now

    def changed(self) -> None:
        """The engine has another size or pace, which voids cached results."""
        self.changes += 1

    def follow_others(self, others: OtherLoad | None, now: float) -> None:
        """Take over the load of other gateways; None = unknown."""
        if others is None and self.others is None:
            return
        self.recent_share = self.own_prefill_share(now) + (0.0 if others is None else others.prefill_share)
        self.share_at = self._others_at = now
        self.others = others
        self.changes += 1

    def first_token(self, request: Reservation, now: float) -> bool:
        """The request's prefill is over. Only the first call counts, and returns True."""
        if request not in self.pending:
            return False
        self._end_prefill(request)
        self._head_since = now
        return True

    def on_tokens(self, tokens: int) -> None:
        """Add streamed tokens. Cached results stay valid until the next change of the load."""
        self.context_tokens += tokens

    def finish(self, request: Reservation, now: float) -> None:
        if request in self.pending:
            if next(iter(self.pending)) is request:
                self._head_since = now
            self._end_prefill(request)
        else:
            self.changes += 1
        self.decoding -= request.sequences
        self.in_flight -= request.sequences
        self.pooled -= request.sequences if request.demand.divisible else 0
        self.context_tokens -= request.demand.prompt_tokens + request.streamed_tokens

    def prefill_ahead_seconds(self, now: float) -> float:
        """Predicted prefill time of pending requests, less the time since the oldest one began."""
        while self.pending:
            head = next(iter(self.pending))
            passed, whole = now - self._head_since, head.prefill_seconds
            if head.demand.streams or passed < whole:
                return max(0.0, self._pending_seconds - (passed if passed < whole else whole))
            self._end_prefill(head)  # not streamed, so its first token is not seen: over at the predicted time
            self._head_since += whole
        return 0.0

    def behind_prefill(self, now: float) -> int:
        """Sequences without a first token while the oldest prefill is expected to take long, with its own; else 0.

        An engine that works in order can start none of them sooner. A prefill that should be over explains no waiting:
        then slots or KV cache are short.
        """
        self.prefill_ahead_seconds(now)  # first: it may change the load
        head = next(iter(self.pending), None)
        if head is None or head.prefill_seconds - (now - self._head_since) <= _LONG_SECONDS:
            return 0
        return sum(request.sequences for request in self.pending)

    def prefill_share(self, now: float) -> float:
        """Share of the engine's recent time that prefills were predicted to take; above 1 = overloaded."""
        return self.recent_share * math.exp((self.share_at - now) / MEMORY_SECONDS)

    def own_prefill_share(self, now: float) -> float:
        """The same without the share of other gateways."""
        share, others = self.prefill_share(now), self.others
        if others is None:
            return share
        return max(0.0, share - others.prefill_share * math.exp((self._others_at - now) / MEMORY_SECONDS))

    def _end_prefill(self, request: Reservation) -> None:
        self.changes += 1
        del self.pending[request]
        self.decoding += request.sequences
        self._pending_seconds = self._pending_seconds - request.prefill_seconds if self.pending else 0.0


_CACHE: Final = 1.0  # weight of the cache that the own prefill takes
_STALL: Final = 0.25  # weight of the stall imposed on resident sequences
_BOUNDLESS_TOKENS: Final = 1e15  # free KV tokens if the size of the KV cache is unknown
_SLOWDOWN: Final = 0.3  # weight of the decode slowdown, mine and theirs
_INTERRUPTED_STEPS: Final = 20.0  # of a new request's decoding that later prefills, at the recent rate, will interrupt
LEAST_SHARE: Final = 0.001  # of recent time in prefill that counts
MOST_SHARE: Final = 0.5  # the observed rate depends on this cost: more would feed back on itself


@dataclass(slots=True, init=False)
class Terms:
    """An engine's part of the cost of every request, until its load changes. Seconds, unless stated otherwise.

    With `output` tokens expected and `prompt` tokens in all, a request costs there
    ahead + own x stall + step x chunks + waits
    + output x (slowdown + slowdown_by_prompt x prompt + slot) + output x room_rate x tokens that do not fit.
    `placement_costs` computes it; `cost_parts` explains it.
    """

    step: float  # an engine step without prefill
    waits: float  # for prefills to begin, the step under way, and other gateways' prefill
    stall: float  # factor of the own prefill
    slowdown: float
    slowdown_by_prompt: float
    slot: float
    room_tokens: float  # free in the KV cache now
    room_by_output: float
    room_rate: float
    interruption: float  # by later prefills, if they take half of the time

    def __init__(
        self, model: CostModel, load: EngineLoad, slots: int, kv_cache_tokens: int | None, slowness: float
    ) -> None:
        batch, context, decoding, weight = load.in_flight, load.context_tokens, load.decoding, model.decode_weight
        others, ahead = load.others, 0.0
        if others is not None:
            batch, context = batch + others.in_flight, context + others.context_tokens
            decoding += others.decoding
            ahead = others.ahead_seconds
        slowdown = _SLOWDOWN * weight * slowness
        self.step = step = slowness * (model.a + model.c * decoding + model.d * context)
        self.waits = step * (batch - decoding + (0.5 if decoding else 0.0)) + ahead
        self.stall = 1 + _CACHE + _STALL * weight * batch
        self.slowdown = slowdown * (2 * model.c * batch + model.d * context + (1 - 1 / slowness) * model.a)
        self.slowdown_by_prompt = slowdown * model.d * batch
        self.slot = (batch + 1 - slots) * step / max(1, decoding) if batch >= slots else 0.0
        self.room_tokens = _BOUNDLESS_TOKENS if kv_cache_tokens is None else float(kv_cache_tokens - context)
        self.room_by_output = batch / 2
        self.room_rate = step / max(1, context)
        self.interruption = _INTERRUPTED_STEPS * weight * step


def prefill_seconds(model: CostModel, slowness: float, prompt_tokens: int, hit_tokens: int) -> float:
    """Time to prefill the uncached part of the prompt; at least one token is computed."""
    uncached = prompt_tokens - min(hit_tokens, prompt_tokens - 1)
    return slowness * uncached * (model.b + model.e * (prompt_tokens - uncached / 2))


DEFAULT_BLOCK_TOKENS = 16

_LEAST_PACE_WEIGHT: Final = 0.05
_PACES_BEFORE: Final = 8  # streams that the configured cost stands for
_EQUAL_LOG_COST: Final = 0.14  # 15 %
_MOST_LOG_COST: Final = 3.0  # 20 times
_SLOWNESS_STEP: Final = 0.05  # relative


class EngineUse(NamedTuple):
    """A part of an engine: sequences, and tokens of its KV cache."""

    slots: int
    kv_tokens: int


@dataclass(slots=True, eq=False)
class Engine:
    """An engine. `index` is unique among the existing ones; only its own methods change its sizes."""

    index: int
    name: str  # of the backend
    rank: int | None = None  # None if the backend has one engine
    _: KW_ONLY
    cap: int = 256  # the most concurrent sequences
    slots: int = 256  # that may be in flight now: the adaptive limit, less while the backend starts slowly
    kv_cache_tokens: int | None = None
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    caches_prefixes: bool = True
    is_shared: bool = False  # another process may have requests there, so it is not idle without own ones
    slowness: float = 1.0  # square root of its relative cost: full weight would overload fast engines
    load: EngineLoad = field(default_factory=EngineLoad)
    kv: KvLedger = field(default_factory=KvLedger)
    placed: int = 0
    adapters: AdapterSlots | None = None  # None = it lists none
    _whole: tuple[int, int | None] = (256, None)  # slots and KV tokens without another process
    _part: EngineUse | None = None  # of this process, during a handover
    _block: EngineUse | None = None  # of this gateway, with coordination
    _log_cost: float = 0.0  # logarithm of its relative cost, as learned
    _paces: int = 0
    _terms: Terms | None = None
    _model: CostModel | None = None
    _changes: int = -1

    def __post_init__(self) -> None:
        self._whole = self.slots, self.kv_cache_tokens
        self._log_cost = 2 * math.log(self.slowness)

    @property
    def relative_cost(self) -> float:
        """Relative time for the same work: 2 = half as fast as others."""
        return self.slowness * self.slowness

    def configure(self, cap: int, block_tokens: int, *, caches_prefixes: bool) -> None:
        self.cap, self.block_tokens, self.caches_prefixes = cap, block_tokens, caches_prefixes
        self.kv.resize(block_tokens, shares=caches_prefixes)

    def list_adapters(self, names: frozenset[str]) -> None:
        """Take over the LoRA adapters that its backend lists."""
        if self.adapters is not None:
            self.adapters.update(names)
        elif names:
            self.adapters = AdapterSlots(names)

    def resize(self, slots: int, kv_cache_tokens: int | None) -> None:
        """Take over its sizes; voids results computed from them."""
        self._whole = slots, kv_cache_tokens
        self._fit()

    def share(self, part: EngineUse | None) -> None:
        """Use at most this part of it, because another process uses the rest; None = all of it.

        A part with all slots, or all of the KV cache, leaves nothing to the other process.
        """
        self._part = part
        self._fit()

    def grant(self, block: EngineUse) -> None:
        """Use at most this block of it: other gateways have the rest, unless the block is all of it."""
        self._block = block
        self._fit()

    def _fit(self) -> None:
        (slots, kv_cache_tokens), part, block = self._whole, self._part, self._block
        tokens, self.is_shared = kv_cache_tokens, False
        if part is not None:
            self.is_shared = part.slots < self.cap and (tokens is None or part.kv_tokens < tokens)
            slots = min(slots, part.slots)
            kv_cache_tokens = None if kv_cache_tokens is None else max(1, min(kv_cache_tokens, part.kv_tokens))
        if block is not None:
            if block.slots < self._whole[0] or (tokens is not None and block.kv_tokens < tokens):
                self.is_shared = True
            slots = min(slots, block.slots)
            kv_cache_tokens = None if kv_cache_tokens is None else max(1, min(kv_cache_tokens, block.kv_tokens))
        if slots != self.slots or kv_cache_tokens != self.kv_cache_tokens:
            self.slots, self.kv_cache_tokens = slots, kv_cache_tokens
            self.load.changed()

    @property
    def whole(self) -> EngineUse:
        """Its slots and KV tokens without another process; 0 tokens = unknown."""
        slots, kv_cache_tokens = self._whole
        return EngineUse(slots, kv_cache_tokens or 0)

    def start_from(self, learned: tuple[float, int]) -> None:
        """Take over the relative cost that another process learned: its `learned`."""
        self._log_cost, self._paces = learned
        self.slowness = self._slowness()
        self.load.changed()

    @property
    def learned(self) -> tuple[float, int]:
        """Logarithm of its relative cost, and the number of streams that showed it."""
        return self._log_cost, self._paces

    def start_at(self, relative_cost: float) -> None:
        """Take another start value of its relative cost; discards the learned one."""
        self.slowness, self._log_cost, self._paces = relative_cost**0.5, math.log(relative_cost), 0
        self.load.changed()

    def streamed(self, calibration: Calibration, token_seconds: float, now: float) -> None:
        """Learn from a stream how slow this engine is, compared with the mean of all streams of the model.

        An engine of relative cost r takes r x (step + prefills of others in that time) for a token.
        """
        load_seconds = self.terms(calibration.model).step + token_seconds * self.load.prefill_share(now)
        if token_seconds > 0 and load_seconds > 0:
            self.on_pace(calibration.paced(math.log(token_seconds * self.slowness / load_seconds)))

    def on_pace(self, log_cost: float) -> None:
        """A stream showed this logarithm of its relative cost. Small differences are noise; steps void fewer costs."""
        self._paces += 1
        weight = max(_LEAST_PACE_WEIGHT, 1 / (_PACES_BEFORE + self._paces))
        self._log_cost += weight * (min(_MOST_LOG_COST, max(-_MOST_LOG_COST, log_cost)) - self._log_cost)
        slowness = self._slowness()
        if abs(slowness - self.slowness) > _SLOWNESS_STEP * self.slowness:
            self.slowness = slowness
            self.load.changed()

    def _slowness(self) -> float:
        return math.exp(self._log_cost / 2) if abs(self._log_cost) > _EQUAL_LOG_COST else 1.0

    def ahead_seconds(self, model: CostModel, now: float) -> float:
        """Prefill sent there before, plus expected interruptions of a new request's decoding by later prefills."""
        load = self.load
        ahead = load.prefill_ahead_seconds(now)  # first: it may change the load
        if load.recent_share >= LEAST_SHARE:
            share = min(MOST_SHARE, load.prefill_share(now))
            ahead += self.terms(model).interruption * share / (1 - share)
        return ahead

    def terms(self, model: CostModel) -> Terms:
        """Its part of the cost of every request now."""
        terms, load = self._terms, self.load
        if terms is None or self._changes != load.changes or self._model is not model:
            self._model, self._changes = model, load.changes
            slots, tokens = (self.slots, self.kv_cache_tokens) if load.others is None else self._whole
            self._terms = terms = Terms(model, load, slots, tokens, self.slowness)
        return terms


def placement_costs(
    model: CostModel, engines: list[Engine], hits: list[int], prompt_tokens: int, output_tokens: float, now: float
) -> tuple[list[float], list[float]]:
    """Marginal costs of a request on each engine, and the part that is its own prefill, in seconds.

    One loop without calls for engines that have not changed.
    """
    costs: list[float] = []
    prefills: list[float] = []
    per_step, count, last_hit, last_slowness, own, chunks = model.max_batched_tokens, len(engines), -1, 0.0, 0.0, 0
    for at in range(count):
        engine, hit = engines[at], hits[at]
        load, slowness = engine.load, engine.slowness
        ahead = load.prefill_ahead_seconds(now) if load.pending else 0.0  # first: it may change the load
        terms = engine._terms  # `terms`, without a call for each engine
        if terms is None or engine._changes != load.changes or engine._model is not model:
            terms = engine.terms(model)
        if load.recent_share >= LEAST_SHARE:  # `ahead_seconds`
            share = load.recent_share * math.exp((load.share_at - now) / MEMORY_SECONDS)
            share = share if share < MOST_SHARE else MOST_SHARE
            ahead += terms.interruption * share / (1 - share)
        if hit != last_hit or slowness != last_slowness:  # most engines hold the same
            last_hit, last_slowness = hit, slowness
            own, chunks = prefill_seconds(model, slowness, prompt_tokens, hit), -((hit - prompt_tokens) // per_step)
        cost = ahead + own * terms.stall + terms.step * chunks + terms.waits
        cost += output_tokens * (terms.slowdown + terms.slowdown_by_prompt * prompt_tokens + terms.slot)
        lacking = prompt_tokens - terms.room_tokens + output_tokens * terms.room_by_output
        costs.append(cost + output_tokens * terms.room_rate * lacking if lacking > 0 else cost)
        prefills.append(own)
    return costs, prefills


def adapter_seconds(engines: list[Engine], model: str) -> list[float]:
    """The adapter delay of a request for this model on each engine; zeros if the model is no adapter."""
    return [0.0 if engine.adapters is None else engine.adapters.seconds(model) for engine in engines]


FEW_ENGINES: Final = 64  # up to this number, all are priced
_LEAST_LOADED: Final = 16
_USUAL_PROMPT_TOKENS: Final = 1000
_USUAL_OUTPUT_TOKENS: Final = 200.0


class Shortlist:
    """Candidates for a request's cheapest engine: the least loaded ones, and engines that hold more of its prompt than
    these. Compares loads by the cost of a usual request, renewed when an engine's load has changed."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self._places = {engine.index: at for at, engine in enumerate(engines)}
        self._loads = [engine.load for engine in engines]
        self._changes = [-1] * len(engines)
        self._costs = [0.0] * len(engines)
        self._ranked = [(0.0, at) for at in range(len(engines))]  # by cost
        self._model: CostModel | None = None

    def refresh(self, model: CostModel, now: float) -> None:
        if model is not self._model:
            self._model, self._changes = model, [-1] * len(self.engines)
        changes = self._changes
        for at, load in enumerate(self._loads):
            if load.changes != changes[at]:
                self._renew(at, load, model, now)

    def _renew(self, at: int, load: EngineLoad, model: CostModel, now: float) -> None:
        engine = [self.engines[at]]
        usual, _ = placement_costs(model, engine, [0], _USUAL_PROMPT_TOKENS, _USUAL_OUTPUT_TOKENS, now=now)
        del self._ranked[bisect_left(self._ranked, (self._costs[at], at))]
        insort(self._ranked, (usual[0], at))
        self._costs[at] = usual[0]
        self._changes[at] = load.changes  # after pricing, which may change it

    def of(self, depths: list[int]) -> list[Engine]:
        """`depths`: the part of the prompt that each engine holds, by the engine's index."""
        engines, limit = self.engines, self._ranked[_LEAST_LOADED - 1][0]
        equal = bisect_left(self._ranked, (limit, len(engines)))
        least = [engines[at] for at in sorted([at for _, at in self._ranked[:equal]])]
        depth = max([depths[engine.index] for engine in least])
        places = self._places
        least += [engines[places[index]] for index, more in enumerate(depths) if more > depth and index in places]
        return least


class Parts(NamedTuple):
    """The parts of a cost, in seconds; `placement_costs` has their sum."""

    ahead: float
    prefill: float
    cache: float
    stall: float
    steps: float
    slowdown: float
    slot: float
    memory: float
    adapter: float = 0.0


def cost_parts(terms: Terms, prompt_tokens: int, own: float, chunks: int, output_tokens: float, ahead: float) -> Parts:
    """The parts of a cost, for explanations. `own`: its `prefill_seconds`, in `chunks` engine steps."""
    lacking = prompt_tokens - terms.room_tokens + output_tokens * terms.room_by_output
    return Parts(
        ahead=ahead,
        prefill=own,
        cache=own * _CACHE,
        stall=own * (terms.stall - 1 - _CACHE),
        steps=terms.step * chunks + terms.waits,
        slowdown=output_tokens * (terms.slowdown + terms.slowdown_by_prompt * prompt_tokens),
        slot=output_tokens * terms.slot,
        memory=output_tokens * terms.room_rate * max(0.0, lacking),
    )
