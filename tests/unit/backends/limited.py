"""A limiter and a modelled engine, which it sees every two seconds."""

from gateway.core.backends.concurrency_limit import LimitChange, Limiter
from gateway.core.backends.facts import Telemetry

LOOK_SECONDS = 2.0


class Site:
    """A limiter and an engine with a given capacity of sequences; demand exceeds it."""

    def __init__(self, limiter: Limiter, seats: int = 10_000) -> None:
        self.limiter = limiter
        self.seats = seats
        self.foreign = 0
        self.seen = Telemetry(0.0, running=0, waiting=0, preemptions=0.0, kv_usage=0.5, in_flight=0, sent=0)
        limiter.observe(self.seen)

    def look(
        self, *, in_flight: int | None = None, preempted: int = 0, kv_usage: float | None = None
    ) -> LimitChange | None:
        """A look after two seconds; as many are in flight as may be, unless it is said. With preemptions it is full."""
        own = self.limiter.limit if in_flight is None else in_flight
        there = own + self.foreign
        seen = self.seen
        self.seen = Telemetry(
            seen.at_seconds + LOOK_SECONDS,
            running=min(there, self.seats),
            waiting=max(0, there - self.seats),
            preemptions=seen.preemptions + preempted,
            kv_usage=kv_usage or (0.95 if preempted else 0.5),
            in_flight=own,
            sent=seen.sent,
        )
        return self.limiter.observe(self.seen)

    def looks(self, times: int) -> list[LimitChange]:
        """The moves of so many looks."""
        return [move for _ in range(times) if (move := self.look())]


def bound(known: int | None, objective: float | None = None) -> Limiter:
    limiter = Limiter(itl_objective_seconds=objective)
    limiter.bind(known, 1)
    return limiter


def stream(limiter: Limiter, tpot: float, at: float, times: int = 8) -> None:
    for _ in range(times):
        limiter.streamed(tpot, at - 1.0, at)
