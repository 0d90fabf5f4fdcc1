"""Engines as the gateway's placement sees them, for engines that exist only here."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.backends.concurrency_limit import EngineSample, Limiter
from gateway.routing.engine import Engine
from loadtest.replay.engine import ReplayEngine
from loadtest.replay.request import ReplayRequest


@dataclass(slots=True)
class ModelledBackend:
    """An engine, and its adaptive limit where it has one; always up."""

    engine: Engine
    limiter: Limiter | None = None

    def scraped(self, modelled: ReplayEngine, now: float) -> bool:
        """What the engine's metrics show at this moment; True if the limit moved for it."""
        if self.limiter is None:
            return False
        scheduler, engine = modelled.scheduler, self.engine
        look = EngineSample(
            at_seconds=now,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            preemptions=scheduler.counters.preemptions,
            kv_usage=scheduler.pool.num_used / scheduler.pool.num_blocks,
            in_flight=engine.load.in_flight,
            sent=engine.placed,
        )
        if self.limiter.observe(look) is None:
            return False
        engine.resize(min(engine.cap, self.limiter.limit), engine.kv_cache_tokens)
        return True

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
    backends = []
    for index in range(engines):
        engine = Engine(index, f"engine-{index}", slowness=speeds[index] ** 0.5)
        engine.configure(cap, block_tokens, caches_prefixes=True)
        engine.resize(cap, kv_cache_tokens)
        backends.append(ModelledBackend(engine))
        if adaptive:
            limiter = backends[-1].limiter = Limiter(itl_objective_seconds=itl_objective_seconds)
            limiter.bind(cap, 1)
    return backends
