"""Feedback from responses, restarts and engines' reports: cache contents, hit accuracy, adaptive limits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

import structlog

from gateway.config import RoutingConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.concurrency_limit import LimitChange
from gateway.core.backends.fleet import Fleet
from gateway.core.observe.metrics import Counter
from gateway.core.observe.record import Record
from gateway.core.request import Demand, Usage
from gateway.core.routing.cache_view import BLOCK_MEMORY_BYTES, EngineBlocks, HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import LEAST_PACED_TOKENS, Estimates, OutputLengths
from gateway.core.routing.policy import HitPredictor
from gateway.core.supervisor import LogThrottle

_UNKNOWN_KV_TOKENS = 2_000_000  # an oversized record costs little, an undersized one much
_START_BYTES_PER_TOKEN = 4.0
_TEMPLATE_TOKENS = 32  # that a chat template adds to a prompt, until it is learned
_LARGE_HIT_TOKENS: Final = 1024
_LOST_SHARE: Final = 0.25  # of a predicted hit: less was confirmed, so the cache may be lost
_MISSES: Final = 2  # in a row: a single one may be a prompt that the engine evicted a little earlier than the record


class Learning:
    """Corrects estimates, the prefix index and hit accuracy from reported usage."""

    def __init__(self, estimates: Estimates, index: PrefixIndex, hit_accuracy: HitAccuracy) -> None:
        self._estimates = estimates
        self._index = index
        self._hit_accuracy = hit_accuracy
        self._misses: dict[int, int] = {}  # consecutive large predicted hits that failed, by engine

    def answered(self, demand: Demand, engine: int, predicted_hit_tokens: int, usage: Usage) -> None:
        """Learn from a response's usage. Large predicted hits that fail show that the engine's cache was lost."""
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
        output = usage.completion_tokens + demand.generated_tokens
        estimates, learnable_bytes = self._estimates, demand.learnable_bytes
        if demand.sequences != 1:  # the tokens include all its prompts and answers
            estimates.learn(demand.model, 0, 0, output // max(1, demand.sequences))
            return
        estimates.learn(demand.model, learnable_bytes, prompt, output)
        if not demand.keys or prompt < 1:
            return
        last = demand.keys[-1]
        if demand.edges[-1] == demand.prompt_size:
            estimates.remember(last, prompt, output)
        if cached is not None:
            self._hit_accuracy.observed(engine, int(predicted_hit_tokens / self._hit_accuracy.share(engine)), cached)
            if predicted_hit_tokens >= _LARGE_HIT_TOKENS and self._is_gone(engine, predicted_hit_tokens, cached):
                self._index.wipe(engine)
                self._index.record(engine, demand.keys, demand.edges)
        if output > 1:
            size = estimates.bytes_per_token(demand.model) if learnable_bytes else demand.prompt_size / prompt
            self._index.record_answer(engine, last, int(output * size))

    def forget(self, engine: int) -> None:
        """Drop the misses of an engine; another engine reuses its number."""
        self._misses.pop(engine, None)

    def _is_gone(self, engine: int, predicted_hit_tokens: int, cached_tokens: int) -> bool:
        missed = cached_tokens < _LOST_SHARE * predicted_hit_tokens
        misses = self._misses.get(engine, 0) + 1 if missed else 0
        self._misses[engine] = misses % _MISSES
        return misses == _MISSES


class CacheReports(Protocol):
    """Engines' own reports of their caches."""

    @property
    def blocks(self) -> EngineBlocks:
        """The blocks of engines with complete and current reports."""

    def finished(self, record: Record) -> bool:
        """A request ended. Returns whether its hit was predicted from reports, not from the own record."""


class CacheState:
    """Owner of the gateway's own record of caches, and of hit accuracy."""

    def __init__(
        self, config: RoutingConfig, fleet: Fleet, clock: Callable[[], float], *, index: PrefixIndex | None = None
    ) -> None:
        """`index`: the own record, if it is not that of a gateway alone."""
        self._fleet = fleet
        self.estimates = Estimates(_START_BYTES_PER_TOKEN)
        self.output_lengths = OutputLengths(prompt_excess_tokens=_TEMPLATE_TOKENS)
        self.index = PrefixIndex([]) if index is None else index
        self.hit_accuracy = HitAccuracy(self._accuracy_changed)
        self._accuracy_throttle = LogThrottle(clock)
        self._logged_falls: set[int] = set()  # engines with failing predictions, if that was logged
        self.hit_predictor = HitPredictor(self.index, self.hit_accuracy)
        self._reports: CacheReports | None = None
        self._learning = Learning(self.estimates, self.index, self.hit_accuracy)
        self._log = structlog.get_logger("gateway")
        self.apply(config)

    def apply(self, config: RoutingConfig) -> None:
        """Take over other sizes of the own record, which keeps as many blocks as fit."""
        self._capacity_factor = config.index_capacity_factor
        self.index.apply(config.index_memory_bytes // BLOCK_MEMORY_BYTES)
        self.follow_sizes()

    def use(self, reports: CacheReports) -> None:
        """Predict from these reports where they are complete; such predictions do not judge the own record."""
        self._reports = reports
        self.hit_predictor.use(reports.blocks)

    def learn(self, record: Record) -> None:
        demand, usage = record.demand, record.usage
        is_reported = self._reports is not None and self._reports.finished(record)
        if demand is None or usage is None:
            return
        self.output_lengths.answered(demand, usage)
        if is_reported:
            usage = replace(usage, cached_tokens=None)
        self._learning.answered(demand, record.engine_index, record.predicted_hit_tokens, usage)

    def holders(self, key: int) -> list[str]:
        """Names of the backends that hold a block, by the gateway's record."""
        holders = set(self.index.holders(key))
        return sorted({engine.name for engine in self._fleet.engines() if engine.index in holders})

    def evicted(self, number: int, held_tokens: int) -> None:
        """An engine has removed blocks, and holds this many tokens: its record is shrunk to as much."""
        if engine := self._fleet.engine(number):
            pending_tokens = engine.load.context_tokens  # sent, and maybe not stored yet
            self.index.shrink(number, self._bytes(held_tokens + pending_tokens, engine))

    def follow_sizes(self) -> None:
        for engine in self._fleet.engines():
            self.index.resize(engine.index, self._record_bytes(engine))

    def forget(self, backend: Backend) -> None:
        """Another process answers there, with an empty cache."""
        for engine in backend.engines:
            self.index.wipe(engine.index)
            self.hit_accuracy.reset(engine.index)

    def left(self, backend: Backend) -> None:
        """Its engines are gone; others will reuse their numbers."""
        for engine in backend.all_engines:
            self.index.wipe(engine.index)
            self.hit_accuracy.reset(engine.index)
            self._learning.forget(engine.index)
            self._logged_falls.discard(engine.index)

    def _accuracy_changed(self, number: int, share: float, holds: bool) -> None:
        """Log that predictions have begun to fail on an engine, or hold again; throttled, since they may flap."""
        if holds:
            if number not in self._logged_falls:
                return
            self._logged_falls.remove(number)
        elif self._accuracy_throttle.allows(number):
            self._logged_falls.add(number)
        else:
            return
        log = self._log.info if holds else self._log.warning
        if engine := self._fleet.engine(number):
            log("prefix_trust", backend=engine.name, rank=engine.rank, confirmed_share=round(share, 2))

    def _record_bytes(self, engine: Engine) -> int:
        return self._bytes(engine.whole.kv_tokens or _UNKNOWN_KV_TOKENS, engine)

    def _bytes(self, tokens: int, engine: Engine) -> int:
        """Size of a record of this many tokens of KV cache, at most."""
        cards = self._fleet.owner(engine.index).facts.models
        ratio = max((self.estimates.bytes_per_token(card.id) for card in cards), default=_START_BYTES_PER_TOKEN)
        return int(tokens * self._capacity_factor * ratio)


class LimitChanges:
    """Feeds streams to the adaptive limits; scans the queue, counts and logs when a limit changes."""

    def __init__(
        self, fleet: Fleet, scan_soon: Callable[[], None], count: Counter, *, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._scan_soon = scan_soon
        self._count = count
        self._throttle = LogThrottle(clock)
        self._log = structlog.get_logger("gateway")
        fleet.on_limit.append(self._changed)

    def finished(self, record: Record) -> None:
        """A request ended: a stream that its client did not slow down shows the engine's pace."""
        first, usage, demand = record.first_byte_seconds, record.usage, record.demand
        if not record.streams or record.client_was_slow or first is None or usage is None or demand is None:
            return
        tokens = usage.completion_tokens / max(1, demand.sequences)
        backend = self._fleet.by_name.get(record.backend)  # None: it has left meanwhile
        if backend is not None and tokens >= LEAST_PACED_TOKENS:
            tpot = (record.ended_seconds - first) / (tokens - 1)
            backend.limiter.streamed(tpot, first, record.ended_seconds)

    def _changed(self, backend: Backend, change: LimitChange | None) -> None:
        self._scan_soon()
        if change is None:
            return
        self._count.add((backend.name, change.reason.value))
        if change.after <= change.before and self._throttle.allows(backend.name):
            self._log.warning(
                "limit_fell", backend=backend.name, reason=change.reason.value, before=change.before, after=change.after
            )
