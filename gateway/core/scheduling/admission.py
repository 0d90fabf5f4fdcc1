"""Whether an engine takes a request now: for one request, and in one scan of the queue.

An engine has capacity while slots and KV cache are free. A scan takes the cheapest prefill first, aged by waiting. A
request is bound if its own best engine has capacity, and keeps waiting for it otherwise, while others overtake. A
starving request comes before all others, and the emptiest engine takes nothing else until it has capacity for it. A
waiting request whose best engine is clearly better than others remembers it for a while, and chooses again when that
engine has capacity; the others choose again in each scan.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibration, OutputLengths
from gateway.core.routing.policy import Options, Policy
from gateway.core.scheduling.fair_share import Tenants
from gateway.core.scheduling.wait_queue import Ticket

_GUARDED_SHARE: Final = 16  # one slot in 16 is guarded, and as much of the KV cache
_GUARDED_BUDGET: Final = 0.75  # of a token budget of prefill: the rest is about as long as a usual prompt
_FEW_SLOTS: Final = 4  # with fewer, one slot is too much to guard


@dataclass(frozen=True, slots=True)
class Capacity:
    """Checks engines for requests of one model. `kv_headroom`: share of the KV cache that may be filled;
    `window_seconds`: prefill that may be ahead.
    """

    calibration: Calibration
    lengths: OutputLengths
    kv_headroom: float = 1.0
    _: KW_ONLY
    window_seconds: float = math.inf

    def is_open(self, engine: Engine, now: float, *, guarded: bool = False) -> bool:
        """Whether it takes requests: a free slot, KV cache left, and prefill ahead within the window.

        `guarded`: the last slots and KV cache do not count, and little prefill may be ahead. The common case is cheap.
        """
        load, slots, tokens = engine.load, engine.slots, engine.kv_cache_tokens
        window, headroom, running = self.window_seconds, self.kv_headroom, load.in_flight
        if guarded:
            slots -= guarded_slots(slots)
            window, headroom = self._guarded_window(), headroom * (1 - 1 / _GUARDED_SHARE)
        if running >= slots:
            return running == 0 and not engine.is_shared
        if (running or engine.is_shared) and tokens:
            ledger, limit, block = engine.kv, headroom * tokens, engine.block_tokens
            spare = limit - ledger.taken_tokens - block
            is_short = spare < 0.0 or spare * spare < ledger.margins_squared
            if is_short and ledger.forecast(now).peak_tokens + block > limit - ledger.margin_tokens:
                return False
        return window == math.inf or not load.pending or load.prefill_ahead_seconds(now) <= window

    def are_open(self, engines: list[Engine], now: float, *, guarded: bool = False) -> list[bool]:
        return [self.is_open(engine, now, guarded=guarded) for engine in engines]

    def admits(self, engine: Engine, demand: Demand, now: float, *, guarded: bool = False) -> bool:
        """Whether it takes this request now: slots, prefill and KV cache. An idle engine takes any prompt.

        `guarded`: as in `is_open`.
        """
        load, slots = engine.load, engine.slots
        wanted = slots_of(demand, engine) if demand.divisible else demand.sequences
        window, headroom = self.window_seconds, self.kv_headroom
        if guarded:
            slots -= guarded_slots(slots)
            window, headroom = self._guarded_window(), headroom * (1 - 1 / _GUARDED_SHARE)
        if load.in_flight + wanted > slots:
            is_idle = load.in_flight == 0 and not engine.is_shared
            return is_idle and wanted <= engine.cap  # larger than a slow start allows: it may run alone
        if window < math.inf and load.pending and load.prefill_ahead_seconds(now) > window:
            return False
        if not engine.kv_cache_tokens or (load.in_flight == 0 and not engine.is_shared):
            return True
        output_tokens, margin_tokens = self.lengths.expected(demand.model, demand.tenant, demand.output_tokens)
        return engine.kv.fits(demand, output_tokens, margin_tokens, headroom * engine.kv_cache_tokens, now)

    def _guarded_window(self) -> float:
        return min(self.window_seconds, _GUARDED_BUDGET * self.calibration.budget_seconds)


def slots_of(demand: Demand, engine: Engine) -> int:
    """Slots that the request takes on an engine; a divisible one takes at most all of them."""
    return min(demand.sequences, engine.cap) if demand.divisible else demand.sequences


def is_large_enough(engine: Engine, demand: Demand) -> bool:
    """Whether the engine could run this request if it were idle."""
    return demand.divisible or demand.sequences <= engine.cap


def guarded_slots(slots: int) -> int:
    """Slots kept from tenants over their share, for others that may come soon."""
    return max(1, slots // _GUARDED_SHARE) if slots >= _FEW_SLOTS else 0


def choose(
    options: Options, demand: Demand, capacity: Capacity, now: float, waits_for_best: bool, guarded: bool
) -> int | None:
    """The position of the cheapest engine; None if it does not admit the request.

    Without `waits_for_best`, of the cheapest engine that admits it. Between equal costs, the engine with less in flight
    wins, then the one chosen less often.
    """
    engines = options.engines
    positions: Sequence[int] = range(len(engines))
    if not waits_for_best:
        positions = [at for at in positions if capacity.admits(engines[at], demand, now, guarded=guarded)]
    if not positions:
        return None
    best = options.cheapest(positions)
    if waits_for_best and not capacity.admits(engines[best], demand, now, guarded=guarded):
        return None
    return best


_LEAD_TOKENS: Final = 1000  # of prefill by which a request's best engine leads, for it to be remembered
_GOOD_FOR_SECONDS: Final = 0.05  # then it is chosen again


@dataclass(slots=True)
class QueueScan:
    """One scan of tickets in fair order. Most wait for an engine without capacity, and are not priced.

    `is_open` has a flag for each engine, kept up to date. `bind` is called with ticket, position of the engine, and the
    engines' prices for it. `tenants`: the last slots are kept from tenants over their share; None = from none.
    """

    engines: list[Engine]
    policy: Policy
    capacity: Capacity
    is_open: list[bool]
    now: float
    bind: Callable[[Ticket, int, Options], None]
    tenants: Tenants | None = None
    # seconds of prefill of the requests that wait for each engine; endless if the starving one reserves it
    held: list[float] = field(init=False)
    _open_guarded: list[bool] = field(init=False)  # the same as `is_open`, for guarded requests
    _is_closed: bool = field(init=False)  # all engines

    def __post_init__(self) -> None:
        self.held = [0.0] * len(self.engines)
        self._open_guarded, self._is_closed = self.is_open, True not in self.is_open
        if self.tenants is not None:
            self._open_guarded = self.capacity.are_open(self.engines, self.now, guarded=True)

    def run(
        self, tickets: Iterable[Ticket], eligible: Mapping[Ticket, Sequence[int]], starving: Ticket | None = None
    ) -> None:
        """`eligible` has the positions of engines for tickets that may not use every engine. `starving` comes first."""
        everywhere = range(len(self.engines))
        if starving is not None and not self._is_closed:
            self._take_emptiest(starving, eligible.get(starving, everywhere))
        for ticket in tickets:
            if self._is_closed:
                return
            if ticket is starving:
                continue
            positions = eligible.get(ticket, everywhere) if eligible else everywhere
            if self.policy.waits_for_best:
                self._take_best(ticket, positions)
            else:
                self._take_any(ticket, positions)

    def _take_best(self, ticket: Ticket, positions: Sequence[int]) -> None:
        at, now = ticket.waits_for, self.now
        is_known = ticket.waits_among is self.engines and now < ticket.waits_until
        if is_known and not self.is_open[at]:  # the usual case
            self.held[at] += ticket.waits_seconds
            return
        guarded = self.tenants is not None and self._is_guarded(ticket)
        is_open = self._open_guarded if guarded else self.is_open
        if not is_known or is_open[at]:
            options = self._price(ticket)
            options.add(self.held)
            at = options.cheapest(positions)
            if options.costs[at] == math.inf:
                return
            is_clear = options.lead(at, positions) >= _LEAD_TOKENS * self.capacity.calibration.model.b
            until = now + _GOOD_FOR_SECONDS if is_clear else now
            ticket.choose(at, options.prefill_seconds[at], self.engines, until)
            if is_open[at]:
                if self.capacity.admits(self.engines[at], ticket.demand, now, guarded=guarded):
                    self._bind(ticket, at, options)
                return  # else it is too large for the free capacity; smaller requests may use that
        self.held[at] += ticket.waits_seconds

    def _take_any(self, ticket: Ticket, positions: Sequence[int]) -> None:
        guarded = self._is_guarded(ticket)
        able = [at for at in positions if self._admits(at, ticket.demand, guarded=guarded)]
        if able:
            options = self._price(ticket)
            self._bind(ticket, options.cheapest(able), options)

    def _take_emptiest(self, ticket: Ticket, positions: Sequence[int]) -> None:
        """Bind it to the emptiest engine, or keep that engine for it."""
        demand, guarded = ticket.demand, self._is_guarded(ticket)
        at = min(positions, key=lambda at: self._fullness(self.engines[at], demand))
        if self._admits(at, demand, guarded=guarded):
            self._bind(ticket, at, self._price(ticket))
            return
        self._open_guarded[at] = False
        if not guarded:
            self.held[at], self.is_open[at] = math.inf, False
            self._is_closed = True not in self.is_open

    def _admits(self, at: int, demand: Demand, *, guarded: bool) -> bool:
        is_open = self._open_guarded if guarded else self.is_open
        return is_open[at] and self.capacity.admits(self.engines[at], demand, self.now, guarded=guarded)

    def _price(self, ticket: Ticket) -> Options:
        return self.policy.options(ticket.demand, self.engines, self.capacity.calibration.model, self.now)

    def _fullness(self, engine: Engine, demand: Demand) -> tuple[bool, float, int]:
        """Least for the engine that will have capacity for the request first."""
        return not is_large_enough(engine, demand), engine.load.in_flight / max(1, engine.slots), engine.index

    def _is_guarded(self, ticket: Ticket) -> bool:
        tenants, demand = self.tenants, ticket.demand
        return tenants is not None and tenants.is_over_share(tenants.of(demand), self.now, batch=demand.batch)

    def _bind(self, ticket: Ticket, at: int, options: Options) -> None:
        self.bind(ticket, at, options)
        self.is_open[at] = self.capacity.is_open(self.engines[at], self.now)
        self._is_closed = True not in self.is_open
        if self.tenants is not None and self._open_guarded[at]:
            self._open_guarded[at] = self.capacity.is_open(self.engines[at], self.now, guarded=True)
