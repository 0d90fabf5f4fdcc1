"""Times single decisions: thousands of them, each alone between two looks at the clock.

The clock is the thread's CPU time, which leaves out what other processes take of a shared machine.
"""

import gc
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any, TypeVar

from gateway._native import prefix_keys
from gateway.config import ServerConfig
from gateway.core.errors import NoBackend
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.json_body import JsonLimits, parse_body
from gateway.core.request import Demand
from gateway.core.routing.estimates import Estimates
from gateway.core.routing.prompt_blocks import canonical_prompt, seed
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from gateway.core.turns import at_once
from loadtest.report.statistics import percentile
from tests.bench.deciding.fleet import Busy
from tests.bench.deciding.results import Timing
from tests.bench.deciding.traffic import MODEL, bodies, incoming, read, reader

RUNS = 1000
LONG_PROMPT_BYTES = 200_000
_LONG_PROMPTS = 8
_STEP_SECONDS = 0.005
_WAITING = 256
_SCAN = 32  # the default of `routing.scan`
_WARM_UPS = 50
_PROMPTS_AN_ENGINE = 90  # twice what its cache holds: hits are what a group shares, seldom the whole prompt

Given = TypeVar("Given")
Got = TypeVar("Got")


def measure(runs: int = RUNS) -> list[Timing]:
    return [
        placing(8, runs, goal_us=50),
        placing(64, runs),
        draining(64, _SCAN, runs, goal_us=250),
        draining(64, _WAITING, runs),
        keying(runs, goal_us=1000),
        reading(runs),
    ]


def placing(engines: int, runs: int, goal_us: float | None = None) -> Timing:
    """`Scheduler.place` of a request that is bound at once; on each engine some 30 are decoding."""
    busy = Busy(engines, cap=256, scan=_SCAN, prompts=_PROMPTS_AN_ENGINE * engines)
    busy.know_all_prompts()
    busy.load(30 * engines)

    def prepare() -> Demand:
        busy.now += _STEP_SECONDS
        return busy.next_ask()

    def settle(lease: object) -> None:
        assert isinstance(lease, Lease)
        busy.held.append(lease)
        busy.scheduler.first_token(lease, busy.now)
        busy.give_one_back()

    name = f"Placement.place, {engines} backends"
    return timed(name, runs, prepare, lambda ask: busy.scheduler.place(ask, busy.now), settle, goal_us)


def draining(engines: int, scan: int, runs: int, goal_us: float | None = None) -> Timing:
    """`Scheduler.drain` with a long line, after one slot of a full fleet came free."""
    busy = Busy(engines, cap=32, scan=scan, prompts=_PROMPTS_AN_ENGINE * engines)
    busy.know_all_prompts()
    busy.fill(_WAITING)

    def prepare() -> None:
        busy.now += _STEP_SECONDS
        busy.give_one_back()

    def act(_: None) -> list[tuple[Ticket, Lease | NoBackend]]:
        return busy.scheduler.scan_queue(MODEL, busy.now)

    def settle(granted: list[tuple[Ticket, Lease | NoBackend]]) -> None:
        busy.take(lease for _, lease in granted)
        busy.refill(_WAITING)

    name = f"Placement.drain, {engines} backends, {_WAITING} waiting, scan {scan}"
    return timed(name, runs, prepare, act, settle, goal_us)


def keying(runs: int, goal_us: float | None = None) -> Timing:
    """A parsed 200 KB chat to the keys of its blocks."""
    limits = JsonLimits(ServerConfig())
    documents = cycle([at_once(parse_body(body, limits)) for body in bodies(_LONG_PROMPTS, [LONG_PROMPT_BYTES])])
    chain = seed(MODEL, "")

    def act(document: dict[str, Any]) -> object:
        return prefix_keys(canonical_prompt(document).pieces, chain)

    return timed("prompt to keys, 200 KB", runs, lambda: next(documents), act, _ignore, goal_us)


def reading(runs: int, goal_us: float | None = None) -> Timing:
    """The bytes of a 200 KB chat to a checked request: JSON, guards, keys."""
    through = reader(Estimates())
    sent = cycle([incoming(body) for body in bodies(_LONG_PROMPTS, [LONG_PROMPT_BYTES])])

    def act(made: HttpRequest) -> object:
        return read(through, made)

    return timed("Reader.read, 200 KB", runs, lambda: next(sent), act, _ignore, goal_us)


def timed(
    name: str,
    runs: int,
    prepare: Callable[[], Given],
    act: Callable[[Given], Got],
    settle: Callable[[Got], None],
    goal_us: float | None = None,
) -> Timing:
    """The time of `act` alone; what comes before and after it is not counted."""
    gc.collect()
    gc.freeze()  # as the gateway does before it serves
    taken: list[float] = []
    try:
        for _ in range(_WARM_UPS + runs):
            given = prepare()
            started = time.thread_time_ns()
            got = act(given)
            taken.append((time.thread_time_ns() - started) / 1e3)
            settle(got)
    finally:
        gc.unfreeze()
    counted = sorted(taken[_WARM_UPS:])
    return Timing(name=name, runs=runs, median_us=median(counted), p99_us=percentile(counted, 99), goal_us=goal_us)


def _ignore(_: object) -> None:
    """Nothing is to be undone."""
