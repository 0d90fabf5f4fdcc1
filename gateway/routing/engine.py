"""One engine of a backend: its sizes, what is in flight on it, and the cost of placing a request there. Pure.

A backend runs one engine, or several (data parallel), each with a KV cache and slots of its own. The fleet makes the
engines and sets their sizes; placement sets what is in flight.

The marginal cost, in seconds, of placing one request on one engine:

cost = prefill ahead of it + its own uncached prefill, which also stalls the sequences that decode there
     + as much again for the cache that it takes there, because blocks that would have been hit are evicted
     + engine steps it waits for + how much it slows decoding down, its own and theirs
     + time until enough KV cache is free + time until a slot is free
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.routing.kv_reservations import KvLedger

MEMORY_SECONDS = 10.0  # over which the share of time spent in prefill is averaged: about as long as an answer takes


@dataclass(slots=True, eq=False)
class Work:
    """One placed request's share of an engine's load.

    `prefill_seconds` is the predicted time of its uncached prompt, `first_token_seconds` that to its first
    token when it is alone in prefill; `observable`: its first token will be seen.
    """

    sequences: int
    prompt_tokens: int
    prefill_seconds: float
    observable: bool
    uncached_tokens: int = 0
    first_token_seconds: float = 0.0
    started_seconds: float = 0.0
    alone: bool = False  # no other request was in prefill with it


class EngineLoad:
    """Requests in flight on one engine: those still in prefill, in order, and those decoding."""

    __slots__ = (
        "_head_since",
        "_pending_seconds",
        "changes",
        "context_tokens",
        "decoding",
        "in_flight",
        "pending",
        "recent_share",
        "share_at",
        "works",
    )

    def __init__(self) -> None:
        self.changes = 0  # number of changes so far
        self.in_flight = 0  # sequences
        self.decoding = 0  # sequences with a first token
        self.context_tokens = 0  # prompt tokens in flight
        self.works: set[Work] = set()  # in flight
        self.pending: dict[Work, None] = {}  # in prefill, oldest first
        self._pending_seconds = 0.0
        self._head_since = 0.0
        self.recent_share = 0.0  # of recent time spent in prefill, as predicted when requests were sent
        self.share_at = 0.0

    def __repr__(self) -> str:
        return f"<EngineLoad {self.in_flight} in flight, {self.decoding} decoding, {self.context_tokens} tokens>"

    def start(self, work: Work, now: float) -> None:
        """A request is sent to the engine."""
        self.changes += 1
        self.works.add(work)
        self.in_flight += work.sequences
        self.context_tokens += work.prompt_tokens
        work.started_seconds = now
        if not self.pending:
            self._head_since = now
            work.alone = True
        elif len(self.pending) == 1:
            next(iter(self.pending)).alone = False
        self.pending[work] = None
        self._pending_seconds += work.prefill_seconds
        self.recent_share = self.prefill_share(now) + work.prefill_seconds / MEMORY_SECONDS
        self.share_at = now

    def first_token(self, work: Work, now: float) -> bool:
        """The request's prefill is over. Only the first call counts, and returns True."""
        if not self._leave_prefill(work):
            return False
        self.changes += 1
        self.decoding += work.sequences
        self._head_since = now
        return True

    def finish(self, work: Work, now: float) -> None:
        """The request is over, however it ended."""
        self.changes += 1
        self.works.discard(work)
        self.in_flight -= work.sequences
        self.context_tokens -= work.prompt_tokens
        was_head = bool(self.pending) and next(iter(self.pending)) is work
        if self._leave_prefill(work):
            self._head_since = now if was_head else self._head_since
        else:
            self.decoding -= work.sequences

    def void(self) -> None:
        """Void what was computed from this load."""
        self.changes += 1

    def prefill_ahead_seconds(self, now: float) -> float:
        """Predicted prefill time of pending requests, less the time since the oldest one began."""
        while self.pending:
            head = next(iter(self.pending))
            passed, whole = now - self._head_since, head.prefill_seconds
            if head.observable or passed < whole:
                return max(0.0, self._pending_seconds - (passed if passed < whole else whole))
            self._leave_prefill(head)  # not streamed, so its first token is not seen: over at the predicted time
            self.changes += 1
            self.decoding += head.sequences
            self._head_since += head.prefill_seconds
        return 0.0

    def prefill_share(self, now: float) -> float:
        """Share of the engine's recent time that prefills were predicted to take; above 1 = overloaded."""
        return self.recent_share * math.exp((self.share_at - now) / MEMORY_SECONDS)

    def _leave_prefill(self, work: Work) -> bool:
        if work not in self.pending:
            return False
        del self.pending[work]
        self._pending_seconds = self._pending_seconds - work.prefill_seconds if self.pending else 0.0
        return True


_SMOOTHING = 0.5  # share of the fleet's mean batch in each backend's batch
_CACHE = 1.0  # weight of the cache that the own prefill takes
_STALL = 0.15  # weight of the stall imposed on resident sequences
_BOUNDLESS_TOKENS = 1e15  # free KV tokens if the size of the KV cache is unknown
_SLOWDOWN = 0.1  # weight of the decode slowdown, mine and theirs


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of an engine's step time, in seconds; all but `b` are in proportion to it.

    A step takes a + b x prefill tokens + e x their context + c x decoding sequences + d x context tokens.
    `decode_weight`: 0 = TTFT alone, 1 = balanced, 5 = end to end.
    """

    b: float = 28e-6
    decode_weight: float = 1.0
    max_batched_tokens: int = 8192
    a: float = field(init=False)
    c: float = field(init=False)
    d: float = field(init=False)
    e: float = field(init=False)

    def __post_init__(self) -> None:
        for name, ratio in (("a", 286), ("c", 0.5), ("d", 1.68e-3), ("e", 4.6e-5)):
            object.__setattr__(self, name, ratio * self.b)


class Terms(NamedTuple):
    """What an engine adds to the cost of every request, until its load changes. Seconds, unless said otherwise.

    With `output` tokens expected and `prompt` tokens in all, a request costs there
    ahead + own x (stall + mean_stall) + step x chunks + waits
    + output x (slowdown + slowdown_by_prompt x prompt + slot) + output x room_rate x tokens that do not fit.
    """

    slowness: float
    step: float  # an engine step without prefill
    waits: float  # for prefills to begin, and the step under way
    stall: float  # factor of the own prefill, without `mean_stall`
    slowdown: float
    slowdown_by_prompt: float
    slot: float
    room_tokens: float  # free in the KV cache now
    room_by_output: float
    room_rate: float


def terms_of(model: CostModel, load: EngineLoad, slots: int, kv_cache_tokens: int | None, slowness: float) -> Terms:
    """The terms of a backend with this load."""
    batch, context, decoding, weight = load.in_flight, load.context_tokens, load.decoding, model.decode_weight
    step = step_seconds(model, slowness, load)
    slowdown = _SLOWDOWN * weight * slowness
    made = (  # not `Terms(...)`, which costs as much as the rest: this runs whenever a load changes
        slowness,
        step,
        step * (batch - decoding + (0.5 if decoding else 0.0)),
        1 + _CACHE + _STALL * weight * (1 - _SMOOTHING) * batch,
        slowdown * (2 * model.c * batch + model.d * context + (1 - 1 / slowness) * model.a),
        slowdown * model.d * batch,
        (batch + 1 - slots) * step / max(1, decoding) if batch >= slots else 0.0,
        _BOUNDLESS_TOKENS if kv_cache_tokens is None else kv_cache_tokens - context,
        batch / 2,
        step / max(1, context),
    )
    return tuple.__new__(Terms, made)


def mean_stall_of(model: CostModel, in_flight: float, backends: int) -> float:
    """What the mean number of sequences in flight, over all backends, adds to the factor of the own prefill."""
    return _STALL * model.decode_weight * _SMOOTHING * in_flight / max(1, backends)


def prefill_seconds(model: CostModel, slowness: float, prompt_tokens: int, hit_tokens: int) -> float:
    """Time to prefill the uncached part of the prompt; at least one token is computed."""
    uncached = prompt_tokens - min(hit_tokens, prompt_tokens - 1)
    return slowness * uncached * (model.b + model.e * (prompt_tokens - uncached / 2))


def step_seconds(model: CostModel, slowness: float, load: EngineLoad) -> float:
    """Time of an engine step without prefill."""
    return slowness * (model.a + model.c * load.decoding + model.d * load.context_tokens)


class Parts(NamedTuple):
    """The parts of a cost, in seconds; their sum is `placement_seconds`."""

    ahead: float
    prefill: float
    cache: float
    stall: float
    steps: float
    slowdown: float
    slot: float
    memory: float


def cost_parts(
    terms: Terms,
    prompt_tokens: int,
    own_seconds: float,
    chunks: int,
    output_tokens: float,
    mean_stall: float,
    ahead_seconds: float,
) -> Parts:
    """The parts of `placement_seconds`, for explanations only."""
    lacking = prompt_tokens - terms.room_tokens + output_tokens * terms.room_by_output
    return Parts(
        ahead=ahead_seconds,
        prefill=own_seconds,
        cache=own_seconds * _CACHE,
        stall=own_seconds * (terms.stall - 1 - _CACHE + mean_stall),
        steps=terms.step * chunks + terms.waits,
        slowdown=output_tokens * (terms.slowdown + terms.slowdown_by_prompt * prompt_tokens),
        slot=output_tokens * terms.slot,
        memory=output_tokens * terms.room_rate * max(0.0, lacking),
    )


def placement_seconds(
    terms: Terms,
    prompt_tokens: int,
    own_seconds: float,
    chunks: int,
    output_tokens: float,
    mean_stall: float,
    ahead_seconds: float,
) -> float:
    """Marginal cost of this request on this backend, in seconds; lower is better.

    `own_seconds` is its `prefill_seconds` there, in `chunks` engine steps; `mean_stall` that of the fleet;
    `ahead_seconds` the prefill that was sent there before.
    """
    (_, step, waits, stall, slowdown, by_prompt, slot, room, room_by_output, room_rate) = terms
    cost = (
        ahead_seconds
        + own_seconds * (stall + mean_stall)
        + step * chunks
        + waits
        + output_tokens * (slowdown + by_prompt * prompt_tokens + slot)
    )
    lacking = prompt_tokens - room + output_tokens * room_by_output
    return cost + output_tokens * room_rate * lacking if lacking > 0 else cost


DEFAULT_BLOCK_TOKENS = 16
INTERRUPTED_STEPS = 20.0  # of a new request's decoding that later prefills, at the recent rate, will interrupt
LEAST_SHARE = 0.001
MOST_SHARE = 0.9


@dataclass(slots=True, eq=False)
class Engine:
    """An engine. `index` is unique and never reused; `configure` and `resize` change its sizes."""

    index: int
    name: str  # of the backend
    rank: int | None = None  # None if the backend has one engine
    cap: int = 256  # the most sequences at once
    slots: int = 256  # that may be in flight now: the adaptive limit, less while the backend starts slowly
    kv_cache_tokens: int | None = None
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    caches_prefixes: bool = True
    slowness: float = 1.0  # square root of its configured relative time: full weight would overload fast engines
    load: EngineLoad = field(default_factory=EngineLoad)
    kv: KvLedger = field(default_factory=KvLedger)
    placed: int = 0
    _terms: Terms | None = None
    _model: CostModel | None = None
    _changes: int = -1

    def configure(self, cap: int, block_tokens: int, *, caches_prefixes: bool) -> None:
        """Follow the settings of its process."""
        self.cap, self.block_tokens, self.caches_prefixes = cap, block_tokens, caches_prefixes
        self.kv.resize(block_tokens, shares=caches_prefixes)

    def resize(self, slots: int, kv_cache_tokens: int | None) -> None:
        """Follow its sizes. A change voids what was computed from them."""
        if slots != self.slots or kv_cache_tokens != self.kv_cache_tokens:
            self.slots, self.kv_cache_tokens = slots, kv_cache_tokens
            self.load.void()

    def ahead_seconds(self, model: CostModel, now: float) -> float:
        """Prefill sent there before, plus expected interruptions of a new request's decoding by later prefills."""
        return self.ahead_and_terms(model, now)[0]

    def ahead_and_terms(self, model: CostModel, now: float) -> tuple[float, Terms]:
        """`ahead_seconds` and `terms` in one call: placing a request needs both of every engine."""
        load = self.load
        ahead = load.prefill_ahead_seconds(now) if load.pending else 0.0  # first: it may change the load
        terms = self._terms
        if terms is None or self._changes != load.changes or self._model is not model:
            terms = self.terms(model)
        if load.recent_share >= LEAST_SHARE:
            share = min(MOST_SHARE, load.prefill_share(now))
            ahead += INTERRUPTED_STEPS * model.decode_weight * terms.step * share / (1 - share)
        return ahead, terms

    def terms(self, model: CostModel) -> Terms:
        """What it adds to the cost of every request now."""
        terms, load = self._terms, self.load
        if terms is None or self._changes != load.changes or self._model is not model:
            self._model, self._changes = model, load.changes
            self._terms = terms = terms_of(model, load, self.slots, self.kv_cache_tokens, self.slowness)
        return terms


@dataclass(slots=True)
class Option:
    """What one engine means for one request: cost in seconds, its own prefill, and predicted hit."""

    engine: Engine
    cost: float
    prefill_seconds: float
    hit_tokens: int

    def discount(self, share: float) -> None:
        """Make it cheaper by a share of its prefill."""
        self.cost -= share * self.prefill_seconds
