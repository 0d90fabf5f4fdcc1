"""What is known of the engines' caches, kept up to date from answers, restarts and sizes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from gateway.backends.backend import Backend, EngineRank
from gateway.backends.registry import Fleet
from gateway.config import Config
from gateway.observe.record import Record
from gateway.request import Ask, Usage
from gateway.routing.estimate import Estimates
from gateway.routing.exact_index import ExactIndex
from gateway.routing.hit_accuracy import HitAccuracy
from gateway.routing.hits import Hits
from gateway.routing.learning import Learning
from gateway.routing.prefix_index import BLOCK_MEMORY_BYTES, PrefixIndex
from gateway.routing.stale_events import StaleEventDetector

_UNKNOWN_KV_TOKENS = 2_000_000  # too large a record costs little, too small a one much
_START_BYTES_PER_TOKEN = 4.0


class CacheState:
    """Owner of the own record, of the engines' view, and of the trust in predictions."""

    def __init__(self, config: Config, fleet: Fleet, in_flight_tokens: Callable[[int], int]) -> None:
        self._fleet = fleet
        self._in_flight_tokens = in_flight_tokens
        self._capacity_factor = config.routing.index_capacity_factor
        max_blocks = config.routing.index_memory_bytes // BLOCK_MEMORY_BYTES
        self.estimates = Estimates(_START_BYTES_PER_TOKEN)
        self.index = PrefixIndex([self._record_bytes(backend) for backend in fleet.backends], max_blocks)
        self.exact = ExactIndex()
        self._silence = StaleEventDetector()
        self._whole: set[int] = set()  # engines of which all that they hold is known, if their events still arrive
        self.trust = HitAccuracy()
        self.hits = Hits(self.index, self.trust, self.exact)
        self._learning = Learning(self.estimates, self.index, self.trust)
        self.follow_sizes()
        self._log = structlog.get_logger("gateway")

    def engine_of(self, seat: int) -> Backend | EngineRank | None:
        """The engine of that number; None if its backend runs no such engine any more."""
        return next((engine for engine in self.engines() if engine.index == seat), None)

    def engines(self) -> list[Backend | EngineRank]:
        """Every engine of every backend."""
        return [engine for backend in self._fleet.backends for engine in self._fleet.engines(backend)]

    def learn(self, record: Record) -> None:
        """A request is over."""
        ask, usage, now = record.ask, record.usage, record.ended_seconds
        if self._whole:
            self.hits.coming.age(now)
            for fallen in self._silence.fallen(now):
                self._follow(fallen)
        if ask is None or usage is None:
            return
        seat = record.seat_index
        by_events = bool(ask.token_keys) and self.exact.live(seat)
        told = replace(usage, cached_tokens=None) if by_events else usage  # judges events then, not the own record
        if by_events and self._is_untold(ask, seat, usage):
            self._silence.answered(seat, now)
        self._learning.answered(ask, seat, record.predicted_hit_tokens, told)

    def holders(self, key: int) -> list[str]:
        """Names of the backends that hold a block, by the own record."""
        holders = set(self.index.holders(key))
        return sorted({engine.name for engine in self.engines() if engine.index in holders})

    def seat_of(self, backend: str, rank: int) -> int | None:
        """The number of an engine; None if the backend has no such rank."""
        known = next((known for known in self._fleet.backends if known.name == backend), None)
        if known is None:
            return None
        if known.facts.engines == 1 and len(known.facts.kv_event_sources or ()) == 1:
            return known.index  # one of several engines whose others are backends of their own keeps its rank
        if rank >= known.facts.engines:
            return None
        return self._fleet.engine(known, rank).index

    def changed(self, seat: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        """An engine says that blocks came and went."""
        self.exact.apply(seat, added, removed)
        if self._silence.heard(seat):
            self._follow(seat)
        self.hits.coming.told(seat, added)
        self.hits.coming.told(seat, removed)
        if removed and self.exact.live(seat) and (engine := self.engine_of(seat)):
            coming = self._in_flight_tokens(seat)  # sent, and maybe not stored yet
            self.index.shrink(seat, self._bytes(resident_tokens + coming, engine.name))

    def cleared(self, seat: int) -> None:
        """An engine says that its cache is empty, or another process took its place."""
        self.index.wipe(seat)
        self.hits.coming.forget(seat)

    def state(self, seat: int, live: bool, whole: bool) -> None:
        """An engine's events are followed, or no longer; and all that it holds is known, or not."""
        if live and whole:
            self._whole.add(seat)
        else:
            self._whole.discard(seat)
        self._silence.heard(seat)
        self.exact.set_live(seat, live and whole)
        if engine := self.engine_of(seat):
            self._log.info("kv_events", backend=engine.name, rank=engine.rank, live=live, whole=whole)

    def follow_sizes(self) -> None:
        """The records are as large as what they are a record of."""
        for engine in self.engines():
            self.index.resize(engine.index, self._record_bytes(engine))

    def forget(self, backend: Backend) -> None:
        """Another process answers there: nothing is cached any more."""
        for engine in self._fleet.engines(backend):
            self.index.wipe(engine.index)
            self.trust.reset(engine.index)

    def _follow(self, seat: int) -> None:
        """An engine has fallen silent, or speaks again."""
        silent = seat in self._silence
        self.exact.set_live(seat, seat in self._whole and not silent)
        if engine := self.engine_of(seat):
            tell = self._log.warning if silent else self._log.info
            tell("kv_events_silent", backend=engine.name, rank=engine.rank, silent=silent)

    def _is_untold(self, ask: Ask, seat: int, usage: Usage) -> bool:
        """Whether the engine has computed a block that its events have not told."""
        engine = self.engine_of(seat)
        if engine is None or usage.cached_tokens is None:
            return False
        return self.hits.coming.run(seat, ask.token_keys, usage.cached_tokens // engine.block_tokens) > 0

    def _record_bytes(self, engine: Backend | EngineRank) -> int:
        return self._bytes(engine.kv_cache_tokens or _UNKNOWN_KV_TOKENS, engine.name)

    def _bytes(self, tokens: int, backend: str) -> int:
        """Of the largest record that so many tokens of KV cache make."""
        cards = next((known.facts.models for known in self._fleet.backends if known.name == backend), ())
        ratio = max((self.estimates.bytes_per_token(card.id) for card in cards), default=_START_BYTES_PER_TOKEN)
        return int(tokens * self._capacity_factor * ratio)
