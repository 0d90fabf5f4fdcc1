"""Whether an engine takes a request now: for one request, and in one scan of the queue.

An engine has capacity while slots and KV cache are free and little prefill is ahead. A scan takes the cheapest prefill
first, aged by waiting. A request is bound if its own best engine has capacity, and keeps waiting for it otherwise,
while others overtake. After `starvation_seconds` any engine will do; if none has capacity, the emptiest takes nothing
else until it has. Predicted hits are kept between scans, because caches change slowly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.request import Demand
from gateway.routing.cost_matrix import Hit, Ranking
from gateway.routing.engine import Engine
from gateway.routing.estimates import Calibration, OutputLengths
from gateway.scheduling.wait_queue import Ticket

_GUARDED_SHARE = 16  # one slot in 16 is guarded, and as much of the KV cache
_GUARDED_WINDOW = 0.75  # of the prefill window: the rest is about as long as a usual prompt
_FEW_SLOTS = 4  # with fewer, one slot is too much to guard


@dataclass(frozen=True, slots=True)
class Capacity:
    """Checks engines for requests of one model. `kv_headroom`: share of the KV cache that may be filled."""

    calibration: Calibration
    lengths: OutputLengths
    kv_headroom: float = 0.95

    def is_open(self, engine: Engine, now: float, *, guarded: bool = False) -> bool:
        """Whether it takes requests: a free slot, KV cache left, and prefill ahead within the window.

        `guarded`: the last slots, KV cache and prefill window do not count.
        """
        return self.are_open((engine,), now, guarded=guarded)[0]

    def are_open(self, engines: Sequence[Engine], now: float, *, guarded: bool = False) -> list[bool]:
        """`is_open` of each engine. Every scan of the queue calls this: the common case is cheap."""
        window, headroom, is_open = self.calibration.window_seconds, self.kv_headroom, []
        if guarded:
            window, headroom = window * _GUARDED_WINDOW, headroom * (1 - 1 / _GUARDED_SHARE)
        for engine in engines:
            load, slots, tokens = engine.load, engine.slots, engine.kv_cache_tokens
            running = load.in_flight
            if running >= (slots - guarded_slots(slots) if guarded else slots):
                is_open.append(running == 0)
                continue
            if running and tokens:
                ledger, limit = engine.kv, headroom * tokens
                free = limit - ledger.taken_tokens
                if free < engine.block_tokens and ledger.forecast(now).peak_tokens + engine.block_tokens > limit:
                    is_open.append(False)
                    continue
            is_open.append(not load.pending or load.prefill_ahead_seconds(now) <= window)
        return is_open

    def admits(self, engine: Engine, demand: Demand, now: float, *, guarded: bool = False) -> bool:
        """Whether it takes this request now: slots, prefill and KV cache. An idle engine takes any prompt.

        `guarded`: as in `is_open`.
        """
        load, slots = engine.load, engine.slots
        wanted = slots_of(demand, engine) if demand.divisible else demand.sequences
        window, headroom = self.calibration.window_seconds, self.kv_headroom
        if guarded:
            slots -= guarded_slots(slots)
            window, headroom = window * _GUARDED_WINDOW, headroom * (1 - 1 / _GUARDED_SHARE)
        if load.in_flight + wanted > slots:
            return load.in_flight == 0 and wanted <= engine.cap  # larger than a slow start allows: it may run alone
        if load.pending and load.prefill_ahead_seconds(now) > window:
            return False
        if load.in_flight == 0 or not engine.kv_cache_tokens:
            return True
        output_tokens = self.lengths.expected(demand.model, demand.tenant, demand.output_tokens)
        return engine.kv.fits(demand, output_tokens, headroom * engine.kv_cache_tokens, now)


def slots_of(demand: Demand, engine: Engine) -> int:
    """Slots that the request takes on an engine; a divisible one takes at most all of them."""
    return min(demand.sequences, engine.cap) if demand.divisible else demand.sequences


def is_large_enough(engine: Engine, demand: Demand) -> bool:
    """Whether the engine could run this request if it were idle."""
    return demand.divisible or demand.sequences <= engine.cap


def guarded_slots(slots: int) -> int:
    """Slots kept from tenants over their share, for others that may come soon."""
    return max(1, slots // _GUARDED_SHARE) if slots >= _FEW_SLOTS else 0


@dataclass(slots=True)
class QueueScan:
    """One scan of tickets in fair order; `is_open` has a flag for each engine, kept up to date.

    `bind` is called with ticket, engine, and seconds of prefill there. `is_over_share` says whether the last slots are
    kept from a ticket; None = from none, or from all if `all_guarded`.
    """

    engines: Sequence[Engine]
    ranking: Ranking
    is_open: list[bool]
    capacity: Capacity
    starvation_seconds: float
    waits_for_best: bool
    bind: Callable[[Ticket, int, float], None]
    is_over_share: Callable[[Ticket], bool] | None = None
    all_guarded: bool = False
    _kept: set[int] = field(default_factory=set)  # engines reserved for a starving request, closed to guarded ones

    def run(self, tickets: Sequence[Ticket], now: float) -> None:
        row, skipped = 0, False
        while row < len(tickets):
            ticket = tickets[row]
            starving = now - ticket.arrived_seconds > self.starvation_seconds
            if starving or not self.waits_for_best:
                self._take_any(row, ticket, now, starving=starving)
            elif not any(self.is_open):
                return
            elif not skipped:
                row, skipped = self.ranking.skip(row, self.is_open), True
                continue
            else:
                self._take_best(row, ticket, now)
            row += 1

    def _take_best(self, row: int, ticket: Ticket, now: float) -> None:
        column = self.ranking.best(row)
        if column is None:
            return
        guarded = self._is_guarded(ticket)
        engine, is_open = self.engines[column], self.is_open[column]
        if guarded and is_open:
            is_open = column not in self._kept and self.capacity.is_open(engine, now, guarded=True)
        if not is_open:
            self.ranking.keep_waiting(row, column)
        elif self.capacity.admits(engine, ticket.demand, now, guarded=guarded):
            self._bind(row, ticket, column, now)
        # else it is too large for what is free there; smaller requests may take that

    def _take_any(self, row: int, ticket: Ticket, now: float, *, starving: bool) -> None:
        columns, guarded = self.ranking.by_cost(row), self._is_guarded(ticket)
        if guarded:
            columns = [column for column in columns if column not in self._kept]
        for column in columns:
            if self.capacity.admits(self.engines[column], ticket.demand, now, guarded=guarded):
                self._bind(row, ticket, column, now)
                return
        if starving and columns:
            column = min(columns, key=lambda column: self._fullness(column, ticket.demand))
            if guarded and not self.all_guarded:
                self._kept.add(column)
            else:
                self.ranking.close(column)
                self.is_open[column] = False

    def _fullness(self, column: int, demand: Demand) -> tuple[bool, float, int]:
        """Least for the engine that will have capacity for the request first."""
        engine = self.engines[column]
        return not is_large_enough(engine, demand), engine.load.in_flight / engine.slots, engine.index

    def _is_guarded(self, ticket: Ticket) -> bool:
        return self.all_guarded or (self.is_over_share is not None and self.is_over_share(ticket))

    def _bind(self, row: int, ticket: Ticket, column: int, now: float) -> None:
        self.bind(ticket, column, self.ranking.prefill(row, column))
        self.ranking.bound(column)
        self.is_open[column] = self.capacity.is_open(self.engines[column], now, guarded=self.all_guarded)


_GOOD_FOR_SECONDS = 1.0  # unless a prompt that begins alike is bound meanwhile
_NEVER = -math.inf


class HitCache:
    """Predicted hits of waiting requests, kept with each ticket; `predict` gives those of a prompt, for each engine.

    A binding voids the hits of prompts that begin alike. Bindings are kept in two generations of at least a second
    each, so memory is bounded by their rate.
    """

    def __init__(self, predict: Callable[[Demand, Sequence[Engine]], Sequence[int]]) -> None:
        self._predict = predict
        self._bound: dict[int, float] = {}  # by first block: when a prompt that begins with it was last bound
        self._bound_before: dict[int, float] = {}  # the generation before
        self._since_seconds = _NEVER  # when the younger generation began

    def __len__(self) -> int:
        return len(self._bound) + len(self._bound_before)

    def bound(self, demand: Demand, now: float) -> None:
        """A prompt is sent to an engine. Needed only while requests wait."""
        if demand.keys:
            if now - self._since_seconds > _GOOD_FOR_SECONDS:
                self._bound_before, self._bound, self._since_seconds = self._bound, {}, now
            self._bound[demand.keys[0]] = now

    def of(self, tickets: Sequence[Ticket], engines: Sequence[Engine], now: float) -> list[Hit]:
        too_old, bound, before = now - _GOOD_FOR_SECONDS, self._bound, self._bound_before
        return [
            ticket.hits
            if (
                ticket.hits_of is engines
                and ticket.hits_seconds >= too_old
                and ticket.hits_seconds > bound.get(ticket.opening, _NEVER)
                and ticket.hits_seconds > before.get(ticket.opening, _NEVER)
            )
            else ticket.keep_hits(self._predict(ticket.demand, engines), engines, now)
            for ticket in tickets
        ]
