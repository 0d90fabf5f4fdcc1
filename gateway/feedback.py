"""What answers, restarts and engines' reports change: cache contents, hit accuracy, adaptive limits.

They reach the routing indexes, placement, metrics and the log.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from gateway.backends.backend import Backend
from gateway.backends.concurrency_limit import LimitChange
from gateway.backends.fleet import Fleet
from gateway.config import Config
from gateway.observe.metrics import Counter
from gateway.observe.record import Record
from gateway.request import Ask, Usage
from gateway.routing.cache_view import HitAccuracy, Hits, StaleEventDetector
from gateway.routing.engine import Engine
from gateway.routing.estimates import Estimates, Learning
from gateway.routing.exact_index import ExactIndex
from gateway.routing.prefix_index import BLOCK_MEMORY_BYTES, PrefixIndex
from gateway.scheduling.leases import Gate
from gateway.supervisor import LogThrottle

_UNKNOWN_KV_TOKENS = 2_000_000  # too large a record costs little, too small a one much
_START_BYTES_PER_TOKEN = 4.0


class CacheState:
    """Owner of the own record, of the engines' view, and of the trust in predictions."""

    def __init__(self, config: Config, fleet: Fleet) -> None:
        self._fleet = fleet
        self._capacity_factor = config.routing.index_capacity_factor
        max_blocks = config.routing.index_memory_bytes // BLOCK_MEMORY_BYTES
        self.estimates = Estimates(_START_BYTES_PER_TOKEN)
        self.index = PrefixIndex([self._record_bytes(backend.engines[0]) for backend in fleet.backends], max_blocks)
        self.exact = ExactIndex()
        self._silence = StaleEventDetector()
        self._whole: set[int] = set()  # engines of which all that they hold is known, if their events still arrive
        self.trust = HitAccuracy()
        self.hits = Hits(self.index, self.trust, self.exact)
        self._learning = Learning(self.estimates, self.index, self.trust)
        self.follow_sizes()
        self._log = structlog.get_logger("gateway")

    def learn(self, record: Record) -> None:
        ask, usage, now = record.ask, record.usage, record.ended_seconds
        if self._whole:
            self.hits.coming.age(now)
            for fallen in self._silence.fallen(now):
                self._follow(fallen)
        if ask is None or usage is None:
            return
        number = record.engine_index
        by_events = bool(ask.token_keys) and self.exact.live(number)
        told = replace(usage, cached_tokens=None) if by_events else usage  # judges events then, not the own record
        if by_events and self._is_untold(ask, number, usage):
            self._silence.answered(number, now)
        self._learning.answered(ask, number, record.predicted_hit_tokens, told)

    def holders(self, key: int) -> list[str]:
        """Names of the backends that hold a block, by the own record."""
        holders = set(self.index.holders(key))
        return sorted({engine.name for engine in self._fleet.engines() if engine.index in holders})

    def engine_number(self, backend: str, rank: int) -> int | None:
        """The number of an engine; None if the backend has no such rank."""
        known = self._fleet.backend(backend)
        if known is None:
            return None
        if len(known.engines) == 1 and len(known.facts.kv_event_sources or ()) == 1:
            rank = 0  # one of several engines whose others are backends of their own keeps its rank
        return known.engines[rank].index if rank < len(known.engines) else None

    def changed(self, number: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        """An engine says that blocks came and went."""
        self.exact.apply(number, added, removed)
        if self._silence.heard(number):
            self._follow(number)
        self.hits.coming.told(number, added)
        self.hits.coming.told(number, removed)
        if removed and self.exact.live(number) and (engine := self._fleet.engine(number)):
            coming = engine.load.context_tokens  # sent, and maybe not stored yet
            self.index.shrink(number, self._bytes(resident_tokens + coming, engine.name))

    def cleared(self, number: int) -> None:
        """An engine says that its cache is empty, or another process took its place."""
        self.index.wipe(number)
        self.hits.coming.forget(number)

    def state(self, number: int, live: bool, whole: bool) -> None:
        """An engine's events are followed, or no longer; and all that it holds is known, or not."""
        if live and whole:
            self._whole.add(number)
        else:
            self._whole.discard(number)
        self._silence.heard(number)
        self.exact.set_live(number, live and whole)
        if engine := self._fleet.engine(number):
            self._log.info("kv_events", backend=engine.name, rank=engine.rank, live=live, whole=whole)

    def follow_sizes(self) -> None:
        """The records are as large as what they are a record of."""
        for engine in self._fleet.engines():
            self.index.resize(engine.index, self._record_bytes(engine))

    def forget(self, backend: Backend) -> None:
        """Another process answers there: nothing is cached any more."""
        for engine in backend.engines:
            self.index.wipe(engine.index)
            self.trust.reset(engine.index)

    def _follow(self, number: int) -> None:
        """An engine has fallen silent, or speaks again."""
        silent = number in self._silence
        self.exact.set_live(number, number in self._whole and not silent)
        if engine := self._fleet.engine(number):
            tell = self._log.warning if silent else self._log.info
            tell("kv_events_silent", backend=engine.name, rank=engine.rank, silent=silent)

    def _is_untold(self, ask: Ask, number: int, usage: Usage) -> bool:
        """Whether the engine has computed a block that its events have not told."""
        engine = self._fleet.engine(number)
        if engine is None or usage.cached_tokens is None:
            return False
        return self.hits.coming.run(number, ask.token_keys, usage.cached_tokens // engine.block_tokens) > 0

    def _record_bytes(self, engine: Engine) -> int:
        return self._bytes(engine.kv_cache_tokens or _UNKNOWN_KV_TOKENS, engine.name)

    def _bytes(self, tokens: int, backend: str) -> int:
        """Of the largest record that so many tokens of KV cache make."""
        known = self._fleet.backend(backend)
        cards = known.facts.models if known is not None else ()
        ratio = max((self.estimates.bytes_per_token(card.id) for card in cards), default=_START_BYTES_PER_TOKEN)
        return int(tokens * self._capacity_factor * ratio)


_TOKENS_OF_A_PACE = 8  # shorter streams tell little


class LimitChanges:
    """Listens to the fleet, and to requests that have ended."""

    def __init__(self, fleet: Fleet, gate: Gate, count: Counter, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._gate = gate
        self._count = count
        self._quiet = LogThrottle(clock)
        self._log = structlog.get_logger("gateway")
        fleet.on_limit.append(self._moved)

    def finished(self, record: Record) -> None:
        """A request ended: a stream that its client took as fast as it came tells the engine's pace."""
        first, usage, ask = record.first_byte_seconds, record.usage, record.ask
        if not record.streams or record.held_up or first is None or usage is None or ask is None:
            return
        tokens = usage.completion_tokens / max(1, ask.sequences)
        backend = self._fleet.backend(record.backend)
        if backend is not None and tokens >= _TOKENS_OF_A_PACE:
            tpot = (record.ended_seconds - first) / (tokens - 1)
            backend.limiter.streamed(tpot, first, record.ended_seconds)

    def _moved(self, backend: Backend, move: LimitChange) -> None:
        self._gate.drain_soon()
        self._count.add((backend.name, move.reason.value))
        if move.after <= move.before and self._quiet.tells(backend.name):
            self._log.warning(
                "limit_fell", backend=backend.name, reason=move.reason.value, before=move.before, after=move.after
            )


class TrustLog:
    """Hears of every fall and rise; a rise is told if its fall was."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._quiet = LogThrottle(clock)  # predictions may waver
        self._fallen: set[int] = set()  # engines whose fall was told
        self._log = structlog.get_logger("gateway")

    def changed(self, number: int, share: float, holds: bool) -> None:
        """Predictions have begun to fail there, or hold again."""
        if holds:
            if number not in self._fallen:
                return
            self._fallen.remove(number)
        elif self._quiet.tells(number):
            self._fallen.add(number)
        else:
            return
        tell = self._log.info if holds else self._log.warning
        if engine := self._fleet.engine(number):
            tell("prefix_trust", backend=engine.name, rank=engine.rank, confirmed_share=round(share, 2))
