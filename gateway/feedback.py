"""Feedback from responses, restarts and KV events: cache contents, hit accuracy, adaptive limits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import structlog

from gateway.backends.backend import Backend
from gateway.backends.concurrency_limit import LimitChange
from gateway.backends.fleet import Fleet
from gateway.config import RoutingConfig
from gateway.observe.metrics import Counter
from gateway.observe.record import Record
from gateway.request import Demand, Usage
from gateway.routing.cache_view import BLOCK_MEMORY_BYTES, HitAccuracy, HitPredictor, PrefixIndex, StaleEventDetector
from gateway.routing.engine import Engine
from gateway.routing.estimates import LEAST_PACED_TOKENS, Estimates, OutputLengths
from gateway.routing.exact_index import ExactIndex
from gateway.supervisor import LogThrottle

_UNKNOWN_KV_TOKENS = 2_000_000  # too large a record costs little, too small a one much
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
        prompt, output, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        if demand.offline is not None:
            output += demand.offline.generated_tokens
        estimates, learnable_bytes = self._estimates, demand.learnable_bytes
        if demand.sequences != 1:  # the tokens are those of all its prompts and answers
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
        """Drop the misses of an engine whose number another one gets."""
        self._misses.pop(engine, None)

    def _is_gone(self, engine: int, predicted_hit_tokens: int, cached_tokens: int) -> bool:
        missed = cached_tokens < _LOST_SHARE * predicted_hit_tokens
        misses = self._misses.get(engine, 0) + 1 if missed else 0
        self._misses[engine] = misses % _MISSES
        return misses == _MISSES


class CacheState:
    """Owner of the gateway's record of caches, of the engines' own view by KV events, and of hit accuracy."""

    def __init__(
        self, config: RoutingConfig, fleet: Fleet, clock: Callable[[], float], *, index: PrefixIndex | None = None
    ) -> None:
        """`index`: the own record, if it is not that of a gateway alone."""
        self._fleet = fleet
        self.estimates = Estimates(_START_BYTES_PER_TOKEN)
        self.output_lengths = OutputLengths(prompt_excess_tokens=_TEMPLATE_TOKENS)
        self.index = PrefixIndex([]) if index is None else index
        self.exact = ExactIndex()
        self._stale_events = StaleEventDetector()
        self._complete: set[int] = set()  # engines whose blocks are all known, while their events arrive
        self.hit_accuracy = HitAccuracy(self._accuracy_changed)
        self._accuracy_throttle = LogThrottle(clock)
        self._logged_falls: set[int] = set()  # engines whose predictions fail, if that was logged
        self.hit_predictor = HitPredictor(self.index, self.hit_accuracy, self.exact)
        self._learning = Learning(self.estimates, self.index, self.hit_accuracy)
        self._log = structlog.get_logger("gateway")
        self.follow(config)

    def follow(self, config: RoutingConfig) -> None:
        """Take over other sizes of the own record, whose blocks stay as far as they fit."""
        self._capacity_factor = config.index_capacity_factor
        self.index.follow(config.index_memory_bytes // BLOCK_MEMORY_BYTES)
        self.follow_sizes()

    def learn(self, record: Record) -> None:
        demand, usage, now = record.demand, record.usage, record.ended_seconds
        if self._complete:
            self.hit_predictor.pending_blocks.age(now)
            for engine in self._stale_events.newly_stale(now):
                self._follow(engine)
        if demand is None or usage is None:
            return
        number = record.engine_index
        self.output_lengths.answered(demand, usage)
        if demand.token_keys and self.exact.live(number):
            if self._is_unreported(demand, number, usage):
                self._stale_events.answered(number, now)
            usage = replace(usage, cached_tokens=None)  # hits by events say nothing of the record
        self._learning.answered(demand, number, record.predicted_hit_tokens, usage)

    def holders(self, key: int) -> list[str]:
        """Names of the backends that hold a block, by the gateway's record."""
        holders = set(self.index.holders(key))
        return sorted({engine.name for engine in self._fleet.engines() if engine.index in holders})

    def engine_number(self, backend: str, rank: int) -> int | None:
        """The number of an engine; None if the backend has no such rank."""
        known = self._fleet.by_name.get(backend)
        if known is None:
            return None
        if len(known.engines) == 1 and len(known.facts.kv_event_sources or ()) == 1:
            rank = 0  # each rank of this deployment is a backend: events carry the original rank
        return known.engines[rank].index if rank < len(known.engines) else None

    def changed(self, number: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        """An engine's events report blocks stored and removed."""
        self.exact.apply(number, added, removed)
        if self._stale_events.heard(number):
            self._follow(number)
        self.hit_predictor.pending_blocks.reported(number, added)
        self.hit_predictor.pending_blocks.reported(number, removed)
        if removed and self.exact.live(number) and (engine := self._fleet.engine(number)):
            pending_tokens = engine.load.context_tokens  # sent, and maybe not stored yet
            self.index.shrink(number, self._bytes(resident_tokens + pending_tokens, engine))

    def cleared(self, number: int) -> None:
        """An engine reports an empty cache, or another process took its place."""
        self.index.wipe(number)
        self.hit_predictor.pending_blocks.forget(number)

    def state(self, number: int, live: bool, whole: bool) -> None:
        """`live`: the engine's events are followed. `whole`: all blocks that it holds are known."""
        if live and whole:
            self._complete.add(number)
        else:
            self._complete.discard(number)
        self._stale_events.heard(number)
        self.exact.set_live(number, live and whole)
        if engine := self._fleet.engine(number):
            self._log.info("kv_events", backend=engine.name, rank=engine.rank, live=live, whole=whole)

    def follow_sizes(self) -> None:
        for engine in self._fleet.engines():
            self.index.resize(engine.index, self._record_bytes(engine))

    def forget(self, backend: Backend) -> None:
        """Another process answers there, with an empty cache."""
        for engine in backend.engines:
            self.index.wipe(engine.index)
            self.hit_accuracy.reset(engine.index)

    def left(self, backend: Backend) -> None:
        """Its engines are gone; their numbers will be those of others. Their KV events end by themselves."""
        for engine in backend.all_engines:
            self.index.wipe(engine.index)
            self.hit_accuracy.reset(engine.index)
            self._learning.forget(engine.index)
            self._stale_events.heard(engine.index)
            self._logged_falls.discard(engine.index)

    def _follow(self, number: int) -> None:
        """An engine's events have become stale, or arrive again."""
        silent = number in self._stale_events
        self.exact.set_live(number, number in self._complete and not silent)
        if engine := self._fleet.engine(number):
            log = self._log.warning if silent else self._log.info
            log("kv_events_silent", backend=engine.name, rank=engine.rank, silent=silent)

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

    def _is_unreported(self, demand: Demand, number: int, usage: Usage) -> bool:
        """Whether the engine has computed a block that its events have not reported."""
        engine, pending_blocks = self._fleet.engine(number), self.hit_predictor.pending_blocks
        if engine is None or usage.cached_tokens is None:
            return False
        return pending_blocks.run(number, demand.token_keys, usage.cached_tokens // engine.block_tokens) > 0

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
