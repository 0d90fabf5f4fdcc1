"""One engine of a backend: its sizes, what is in flight on it, and what it adds to the cost of any request. Pure.

A backend runs one engine, or several (data parallel), each with a KV cache and slots of its own. The fleet makes the
engines and sets their sizes; placement sets what is in flight.
"""

from dataclasses import dataclass, field

from gateway.routing.cost import CostModel, Terms, terms_of
from gateway.routing.engine_load import EngineLoad
from gateway.routing.kv_reservations import KvLedger

DEFAULT_BLOCK_TOKENS = 16
INTERRUPTED_STEPS = 20.0  # of decoding, for which a new request counts prefills to come at the rate of late
LEAST_SHARE = 0.001
MOST_SHARE = 0.9


@dataclass(slots=True, eq=False)
class Engine:
    """An engine. `index` is a number that no other engine ever has; `configure` and `resize` change its sizes."""

    index: int
    name: str  # of the backend
    rank: int | None = None  # None if the backend has one engine
    cap: int = 256  # the most sequences at once
    slots: int = 256  # that may be in flight now: the adaptive limit, less while the backend starts slowly
    kv_cache_tokens: int | None = None
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    caches_prefixes: bool = True
    slowness: float = 1.0  # the root of its configured relative time: full weight would overload the fast ones
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
        """Follow its sizes. What was computed from others is void, as when the load changes."""
        if slots != self.slots or kv_cache_tokens != self.kv_cache_tokens:
            self.slots, self.kv_cache_tokens = slots, kv_cache_tokens
            self.load.changes += 1

    def ahead_seconds(self, model: CostModel, now: float) -> float:
        """Prefill sent there before, and that by which later ones will interrupt a new request's decoding."""
        return self.ahead_and_terms(model, now)[0]

    def ahead_and_terms(self, model: CostModel, now: float) -> tuple[float, Terms]:
        """`ahead_seconds` and `terms`, together for half the cost: placing a request asks this of every engine."""
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
        """What it contributes to the cost of every request now."""
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
