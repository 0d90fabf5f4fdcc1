"""Backends as the gateway's placement sees them, for engines that exist only here."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.backends.concurrency_limit import EngineSample, Limiter
from gateway.routing.cost import Seat
from loadtest.replay.engine import ReplayEngine
from loadtest.replay.request import ReplayRequest


@dataclass(slots=True)
class ModelledBackend:
    """An engine's sizes, and its adaptive limit where it has one; always up."""

    name: str
    index: int
    cap: int
    kv_cache_tokens: int | None
    block_tokens: int
    speed: float = 1.0
    caches_prefixes: bool = True
    rank: int | None = None
    limiter: Limiter | None = None

    def limit(self, now_seconds: float) -> int:  # noqa: ARG002
        """Sequences that it may have in flight."""
        return self.cap if self.limiter is None else min(self.cap, self.limiter.limit)

    def scraped(self, engine: ReplayEngine, seat: Seat | None, now: float) -> bool:
        """What the engine's metrics show at this moment; True if the limit moved for it."""
        if self.limiter is None:
            return False
        scheduler = engine.scheduler
        look = EngineSample(
            at_seconds=now,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            preemptions=scheduler.counters.preemptions,
            kv_usage=scheduler.pool.num_used / scheduler.pool.num_blocks,
            in_flight=0 if seat is None else seat.load.in_flight,
            sent=0 if seat is None else seat.placed,
        )
        return self.limiter.observe(look) is not None

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
) -> list[ModelledBackend]:
    """As many backends as there are engines; `speeds` are their relative step times."""
    backends = [
        ModelledBackend(f"engine-{index}", index, cap, kv_cache_tokens, block_tokens, speeds[index])
        for index in range(engines)
    ]
    if adaptive:
        for backend in backends:
            backend.limiter = Limiter(itl_objective_seconds=itl_objective_seconds)
            backend.limiter.bind(cap, 1)
    return backends
