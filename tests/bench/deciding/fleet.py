"""A placement over a fleet in memory, whose engines are as busy as one wants."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from random import Random

from gateway.core.request import Demand
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibrations, CostModel, Estimates, OutputLengths
from gateway.core.routing.policy import Affinity, HitPredictor, PrefixPolicy
from gateway.core.scheduling.scheduler import Lease, Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue
from tests.bench.deciding.traffic import MODEL, asks

KV_CACHE_TOKENS = 430_000
_BYTES_PER_TOKEN = 4
_ENDLESS = 1 << 40


class Busy:
    """A fleet with requests in flight; the clock is turned by hand, and first tokens come at once."""

    def __init__(self, engines: int, cap: int, scan: int, prompts: int, seed: int = 0) -> None:
        estimates = Estimates()
        index = PrefixIndex([KV_CACHE_TOKENS * _BYTES_PER_TOKEN] * engines)
        calibration = Calibrations(CostModel())
        self.engines = [
            Engine(number, f"10.0.0.{number}:8000", cap=cap, slots=cap, kv_cache_tokens=KV_CACHE_TOKENS)
            for number in range(engines)
        ]
        fleet = {MODEL: self.engines}
        policy = PrefixPolicy(HitPredictor(index, HitAccuracy()), estimates, Affinity())
        self.queue = Queue(_ENDLESS, _ENDLESS)
        self.scheduler = Scheduler(
            fleet.get,
            policy,
            queue=self.queue,
            lengths=OutputLengths(),
            calibrations=calibration,
            settings=SchedulerSettings(scan=scan),
        )
        self.held: list[Lease] = []
        self.now = 0.0
        self._random = Random(seed)
        known = asks(estimates, prompts)
        self._random.shuffle(known)
        self._demands: Iterator[Demand] = cycle(known)
        self._prompts = prompts
        self._tenants = [""]

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return self.queue.waiting(MODEL)

    def next_ask(self) -> Demand:
        """The next request; after the last comes the first again, as in a conversation that goes on."""
        demand = next(self._demands)
        return replace(demand, tenant=self._random.choice(self._tenants)) if len(self._tenants) > 1 else demand

    def serve_tenants(self, count: int) -> None:
        """Requests come from so many tenants from now on."""
        self._tenants = [f"tenant-{number}" for number in range(count)]

    def give_back(self, lease: Lease) -> None:
        """A request is over."""
        self.scheduler.release(lease, self.now, answered=True)

    def give_one_back(self) -> None:
        """Some request in flight is over."""
        at = self._random.randrange(len(self.held))
        self.held[at], self.held[-1] = self.held[-1], self.held[at]
        self.give_back(self.held.pop())

    def know_all_prompts(self) -> None:
        """Every prompt has been placed once: the index holds what the caches would."""
        for _ in range(self._prompts):
            self.now += 0.01
            placed = self.scheduler.place(self.next_ask(), self.now)
            assert isinstance(placed, Lease)
            self.scheduler.first_token(placed, self.now)
            self.give_back(placed)

    def load(self, in_flight: int) -> None:
        """So many requests in flight on the whole fleet, all decoding."""
        while len(self.held) < in_flight:
            self.take([self.scheduler.place(self.next_ask(), self.now)])

    def fill(self, waiting: int, turns: int | None = None) -> None:
        """No slot is free, and so many wait; none of them for so long that an engine would be kept for it.

        `turns`: the requests that end and are replaced after that; None = four times as many as wait.
        """
        for engine in self.engines:
            while engine.load.in_flight < engine.slots:
                placed = self.scheduler.place(replace(next(self._demands), pinned=engine.name), self.now)
                assert isinstance(placed, Lease)
                self.take([placed])
        self.refill(waiting)
        for _ in range(4 * waiting if turns is None else turns):
            self.now += 0.005
            self.give_one_back()
            self.drain()
            self.refill(waiting)

    def drain(self) -> None:
        """Whoever can be bound takes a slot."""
        self.take(lease for _, lease in self.scheduler.scan_queue(MODEL, self.now))

    def refill(self, waiting: int) -> None:
        """New requests join the line until so many wait."""
        while self.waiting < waiting:
            self.take([self.scheduler.place(self.next_ask(), self.now)])

    def take(self, placed: Iterable[object]) -> None:
        """Those who were bound hold their slots; of the others there is nothing to hold."""
        for lease in placed:
            if isinstance(lease, Lease):
                self.scheduler.first_token(lease, self.now)
                self.held.append(lease)
