"""A fleet in memory, and placement over it, under a clock that the test turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.core.request import Demand
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibrations, CostModel, Estimates, OutputLengths
from gateway.core.routing.policy import (
    Affinity,
    HitPredictor,
    LeastLoadedPolicy,
    Policy,
    PrefixPolicy,
    RoundRobinPolicy,
)
from gateway.core.scheduling.scheduler import Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue, Ticket

POLICIES = ("prefix", "least_loaded", "round_robin")
WINDOW_SECONDS = 0.1
STARVATION_SECONDS = 30.0
KV_HEADROOM = 0.95


@dataclass
class Hall:
    """Engines and a placement over them. `serving` has those of each model; call `changed` after editing it or them."""

    sites: list[Engine]
    scheduler: Scheduler
    queue: Queue
    index: PrefixIndex
    estimates: Estimates
    lengths: OutputLengths
    calibration: Calibrations
    serving: dict[str, Sequence[Engine]] = field(default_factory=dict)
    now: float = 0.0

    @property
    def state(self) -> str:
        """What runs on each engine, of how many slots; and how many requests wait."""
        engines = ", ".join(f"{site.name} {site.load.in_flight}/{site.slots}" for site in self.sites)
        return f"{engines}; {len(self.queue)} waiting"

    def clock(self) -> float:
        return self.now

    def changed(self) -> None:
        for site in self.sites:
            site.load.changes += 1
        self.scheduler.refresh()


def policy_of(name: str, index: PrefixIndex, estimates: Estimates) -> Policy:
    if name == "prefix":
        return PrefixPolicy(HitPredictor(index, HitAccuracy()), estimates, Affinity())
    return LeastLoadedPolicy() if name == "least_loaded" else RoundRobinPolicy()


def engine(index: int, slots: int, name: str = "", rank: int | None = None, kv: int | None = None) -> Engine:
    """An engine of a backend named a, b, c, ... by its number."""
    return Engine(index, name or "abcdefgh"[index], rank, cap=slots, slots=slots, kv_cache_tokens=kv)


def hall(
    *slots: int,
    policy: str = "least_loaded",
    kv: int | None = None,
    max_requests: int = 100,
    max_bytes: int = 10_000,
    scan: int = 64,
    aging: float = 0.05,
    holds: bool = True,
) -> Hall:
    """A backend of that many slots each: a, b, c, ... all serve the model `m`."""
    sites = [engine(number, count, kv=kv) for number, count in enumerate(slots or (4,))]
    index, estimates, lengths = PrefixIndex([1 << 30] * len(sites)), Estimates(), OutputLengths()
    queue = Queue(max_requests, max_bytes)
    serving: dict[str, Sequence[Engine]] = {"m": sites}
    settings = SchedulerSettings(
        aging=aging,
        kv_headroom=KV_HEADROOM,
        scan=scan,
        starvation_seconds=STARVATION_SECONDS,
        hold_without_backend=holds,
        prefill_window_seconds=WINDOW_SECONDS,
    )
    calibration = Calibrations(CostModel())
    find: Callable[[str], Sequence[Engine] | None] = serving.get
    scheduler = Scheduler(
        find,
        policy_of(policy, index, estimates),
        queue=queue,
        lengths=lengths,
        calibrations=calibration,
        settings=settings,
    )
    return Hall(sites, scheduler, queue, index, estimates, lengths, calibration, serving)


def ask(**fields: object) -> Demand:
    """A small streamed request to the model `m`."""
    return Demand(**({"model": "m", "prompt_tokens": 100, "streams": True, "size_bytes": 10} | fields))  # type: ignore[arg-type]


def ticket(
    demand: Demand,
    arrived_seconds: float = 0.0,
    prefill_seconds: float = 0.0,
    *,
    avoid: frozenset[str] = frozenset(),
    turn: float = 0.0,
    tokens: float | None = None,
) -> Ticket:
    """A ticket that is charged its prompt."""
    charged = float(demand.prompt_tokens) if tokens is None else tokens
    return Ticket(demand, arrived_seconds, avoid, prefill_seconds, turn, charged)


def in_order(queue: Queue, model: str, count: int) -> list[Ticket]:
    """The first tickets of a model's queue."""
    waiting = queue.of_model(model)
    return [] if waiting is None else waiting.in_order(count)
