"""The contents of engines' caches, from their own KV events.

Events are tens of milliseconds late, and requests with a common prefix often come closer together: recently sent blocks
count as held before their events. If an engine's events stop while the connection stands, its answers reveal it, and
the gateway's own record replaces them.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import structlog

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.feedback import CacheState
from gateway.core.observe.record import Record
from gateway.core.request import Demand, Usage
from gateway.features.exact.index import ExactIndex

LIFE_SECONDS: Final = 5.0  # without an event after once to twice this time, the request has failed


class PendingBlocks:
    """Blocks sent to each engine and not in its events yet, by the keys of `index.token_keys`."""

    def __init__(self) -> None:
        self._young: dict[int, int] = {}  # key -> bit mask of engines
        self._old: dict[int, int] = {}
        self._since_seconds = 0.0

    def __bool__(self) -> bool:
        return bool(self._young or self._old)

    def expect(self, engine: int, keys: Iterable[int]) -> None:
        young, bit = self._young, 1 << engine
        for key in keys:
            young[key] = young.get(key, 0) | bit

    def reported(self, engine: int, keys: Iterable[int]) -> None:
        """The engine's events have reported these blocks, as stored or removed."""
        if not self:
            return
        others = ~(1 << engine)
        for key in keys:
            for generation in (self._young, self._old):
                if key not in generation:
                    continue
                if left := generation[key] & others:
                    generation[key] = left
                else:
                    del generation[key]

    def forget(self, engine: int) -> None:
        self.reported(engine, [*self._young, *self._old])

    def age(self, now: float) -> None:
        """Forget expired blocks; to be called periodically."""
        if now - self._since_seconds >= LIFE_SECONDS:
            self._since_seconds = now
            self._young, self._old = {}, self._young

    def run(self, engine: int, keys: Sequence[int], start: int) -> int:
        """Number of consecutive blocks, from `start` on, that are pending on the engine."""
        young, old, end = self._young, self._old, start
        while end < len(keys) and (young.get(keys[end], 0) | old.get(keys[end], 0)) >> engine & 1:
            end += 1
        return end - start


class BlockIndex(Protocol):
    """The blocks that engines hold: an `ExactIndex`; the load tester has an own one."""

    def live(self, engine: int) -> bool: ...

    def depths(self, keys: Sequence[int]) -> Sequence[int]: ...


class KnownBlocks:
    """Blocks that engines hold by an index, or that were sent there and are not in it yet."""

    def __init__(self, index: BlockIndex) -> None:
        self.pending = PendingBlocks()
        self._index = index

    def depths(self, keys: Sequence[int]) -> dict[int, int]:
        """The number of leading blocks held or pending, by engine, of engines with known blocks."""
        index, pending = self._index, self.pending
        found = {engine: depth for engine, depth in enumerate(index.depths(keys)) if index.live(engine)}
        if pending:
            for engine, depth in found.items():
                while depth < len(keys) and (more := pending.run(engine, keys, depth)):
                    depth += more
                    depth += index.depths(keys[depth:])[engine]  # engines evict a block before its successors
                found[engine] = depth
        return found

    def placed(self, engine: int, keys: Sequence[int]) -> None:
        """A prompt with these blocks was sent to the engine."""
        if self._index.live(engine):
            self.pending.expect(engine, keys[self._index.depths(keys)[engine] :])


PATIENCE_SECONDS: Final = 3.0  # events follow an answer by tens of milliseconds


class StaleEventDetector:
    """Engines that answered and have sent no events since. Times are those at which requests ended."""

    def __init__(self) -> None:
        self._awaited: dict[int, float] = {}
        self._stale: set[int] = set()

    def __contains__(self, engine: int) -> bool:
        return engine in self._stale

    def answered(self, engine: int, now: float) -> None:
        """The engine has computed blocks that its events have not reported yet."""
        self._awaited.setdefault(engine, now)

    def heard(self, engine: int) -> bool:
        """An event arrived; returns whether the engine's events had been stale."""
        self._awaited.pop(engine, None)
        was_stale = engine in self._stale
        self._stale.discard(engine)
        return was_stale

    def newly_stale(self, now: float) -> list[int]:
        """Engines with newly stale events, each returned once."""
        fallen = [engine for engine, since in self._awaited.items() if now - since > PATIENCE_SECONDS]
        for engine in fallen:
            del self._awaited[engine]
        self._stale.update(fallen)
        return fallen


class ExactCaches:
    """Owner of the engines' view: their blocks by KV events, and whether the events are complete and still come."""

    def __init__(self, index: ExactIndex, fleet: Fleet, cache_state: CacheState) -> None:
        self.blocks = KnownBlocks(index)
        self._index = index
        self._pending = self.blocks.pending
        self._stale_events = StaleEventDetector()
        self._complete: set[int] = set()  # engines with completely known blocks, while their events arrive
        self._fleet = fleet
        self._cache_state = cache_state
        self._log = structlog.get_logger("gateway")

    def engine_number(self, backend: str, rank: int) -> int | None:
        """The number of an engine; None if the backend has no such rank."""
        known = self._fleet.by_name.get(backend)
        if known is None:
            return None
        if len(known.engines) == 1 and len(known.facts.kv_event_sources or ()) == 1:
            rank = 0  # each rank of this deployment is a backend: events carry the original rank
        return known.engines[rank].index if rank < len(known.engines) else None

    def changed(self, engine: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        """An engine's events report blocks stored and removed."""
        self._index.update(engine, added, removed)
        if self._stale_events.heard(engine):
            self._follow(engine)
        self._pending.reported(engine, added)
        self._pending.reported(engine, removed)
        if removed and self._index.live(engine):
            self._cache_state.evicted(engine, resident_tokens)

    def cleared(self, engine: int) -> None:
        """An engine reports an empty cache, or another process took its place."""
        self._cache_state.index.wipe(engine)
        self._pending.forget(engine)

    def state(self, engine: int, live: bool, whole: bool) -> None:
        """`live`: the engine's events are followed. `whole`: all blocks that it holds are known."""
        if live and whole:
            self._complete.add(engine)
        else:
            self._complete.discard(engine)
        self._stale_events.heard(engine)
        self._index.set_live(engine, live and whole)
        if known := self._fleet.engine(engine):
            self._log.info("kv_events", backend=known.name, rank=known.rank, live=live, whole=whole)

    def finished(self, record: Record) -> bool:
        """A request ended. Returns whether its hit was predicted from the engine's events."""
        now, demand, usage, engine = record.ended_seconds, record.demand, record.usage, record.engine_index
        if self._complete:
            self._pending.age(now)
            for stale in self._stale_events.newly_stale(now):
                self._follow(stale)
        if demand is None or usage is None or not demand.token_keys or not self._index.live(engine):
            return False
        if self._is_unreported(demand, engine, usage):
            self._stale_events.answered(engine, now)
        return True

    def left(self, backend: Backend) -> None:
        """Its engines are gone; others will reuse their numbers. Their events end by themselves."""
        for engine in backend.all_engines:
            self._stale_events.heard(engine.index)

    def _follow(self, number: int) -> None:
        """An engine's events have become stale, or arrive again."""
        silent = number in self._stale_events
        self._index.set_live(number, number in self._complete and not silent)
        if engine := self._fleet.engine(number):
            log = self._log.warning if silent else self._log.info
            log("kv_events_silent", backend=engine.name, rank=engine.rank, silent=silent)

    def _is_unreported(self, demand: Demand, number: int, usage: Usage) -> bool:
        """Whether the engine has computed a block that its events have not reported."""
        engine = self._fleet.engine(number)
        if engine is None or usage.cached_tokens is None:
            return False
        return self._pending.run(number, demand.token_keys, usage.cached_tokens // engine.block_tokens) > 0
