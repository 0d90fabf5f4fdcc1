"""Tenants that always have something waiting, served in steps of a clock of the test."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from gateway.core.request import Demand
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import Hall

STEP_SECONDS = 0.02


@dataclass
class Crowd:
    """Who wants what; `run` lets time pass."""

    here: Hall
    random: Random = field(default_factory=lambda: Random(1))
    served: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=dict)
    running: list[tuple[float, Lease, int]] = field(default_factory=list)
    lengths: dict[Ticket, int] = field(default_factory=dict)

    def send(self, ask: Demand, output_tokens: int) -> bool:
        """A request comes; False = it has to wait."""
        placed = self.here.scheduler.place(ask, self.here.now)
        if isinstance(placed, Ticket):
            self.lengths[placed] = output_tokens
            self.drain()
            return False
        self._bound(placed, output_tokens)
        return True

    def keep_waiting(self, tenant: str, count: int, make: Callable[[Random], tuple[Demand, int]]) -> None:
        """So many requests of a tenant wait."""
        have = sum(1 for ticket in self.here.queue if ticket.demand.tenant == tenant)
        for _ in range(count - have):
            self.send(*make(self.random))

    def step(self) -> None:
        """Some answers end; their slots go to others."""
        self.here.now += STEP_SECONDS
        ended = [one for one in self.running if one[0] <= self.here.now]
        self.running = [one for one in self.running if one[0] > self.here.now]
        for _, lease, output_tokens in ended:
            ask = lease.demand
            served = ask.prompt_tokens - lease.hit_tokens + output_tokens
            self.served[ask.tenant] += served
            self.here.scheduler.release(lease, self.here.now, answered=True, served_tokens=served)
        self.drain()

    def drain(self) -> None:
        for ticket, granted in self.here.scheduler.scan_queue("m", self.here.now):
            assert isinstance(granted, Lease)
            self._bound(granted, self.lengths.pop(ticket))

    def _bound(self, lease: Lease, output_tokens: int) -> None:
        self.here.scheduler.first_token(lease, self.here.now)
        self.waits.setdefault(lease.demand.tenant, []).append(lease.waited_seconds)
        self.running.append((self.here.now + 0.001 * output_tokens, lease, output_tokens))
