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
from gateway.routing.estimates import Calibrations, OutputLengths
from gateway.routing.kv_reservations import Reservation
from gateway.scheduling.wait_queue import Ticket

_GUARDED_SHARE = 16  # one slot in 16 is guarded, and as much of the KV cache
_GUARDED_WINDOW = 0.75  # of the prefill window: the rest is about as long as a usual prompt
_FEW_SLOTS = 4  # with fewer, one slot is too much to guard


@dataclass(frozen=True, slots=True)
class Capacity:
    """Checks engines. `kv_headroom`: share of the KV cache that may be filled."""

    calibrations: Calibrations
    lengths: OutputLengths
    kv_headroom: float = 0.95

    def is_open(self, engine: Engine, model: str, now: float, *, guarded: bool = False) -> bool:
        """Whether it takes requests for this model: a free slot, KV cache left, and prefill ahead within the window.

        `guarded`: the last slots, KV cache and prefill window do not count.
        """
        return self.are_open((engine,), model, now, guarded=guarded)[0]

    def are_open(self, engines: Sequence[Engine], model: str, now: float, *, guarded: bool = False) -> list[bool]:
        """`is_open` of each engine. Every scan of the queue calls this: the common case is cheap."""
        window, headroom, is_open = self._window_seconds(model, guarded), self._headroom(guarded), []
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
        """Whether it takes this request now. `guarded`: as in `is_open`."""
        wanted = self.slots_of(demand, engine)
        if engine.load.in_flight + wanted > (engine.slots - guarded_slots(engine.slots) if guarded else engine.slots):
            # a request larger than a slow start allows may run alone
            return engine.load.in_flight == 0 and self.is_large_enough(engine, demand)
        if engine.load.prefill_ahead_seconds(now) > self._window_seconds(demand.model, guarded):
            return False
        return self._fits(engine, demand, now, guarded)

    def _fits(self, engine: Engine, demand: Demand, now: float, guarded: bool) -> bool:
        """Whether its prompt and output fit into the KV cache beside what runs there; an idle engine takes anything.

        If the sum of all reservations leaves too little, the forecast peak of what is in use at once decides.
        """
        if not engine.kv_cache_tokens or engine.load.in_flight == 0:
            return True
        ledger, answer = engine.kv, self.output_tokens(demand)
        limit = self._headroom(guarded) * engine.kv_cache_tokens
        free = limit - ledger.taken_tokens
        if ledger.most_needed(demand, answer) <= free:
            return True  # the usual case, and cheap
        if ledger.needed(demand, answer) <= free:
            return True
        return ledger.peak_with(demand, answer, now) <= limit

    def _window_seconds(self, model: str, guarded: bool) -> float:
        window = self.calibrations.of(model).window_seconds
        return _GUARDED_WINDOW * window if guarded else window

    def _headroom(self, guarded: bool) -> float:
        return self.kv_headroom * (1 - 1 / _GUARDED_SHARE) if guarded else self.kv_headroom

    def reserve(self, engine: Engine, demand: Demand) -> Reservation:
        """Reserve the request's KV tokens on the engine."""
        return engine.kv.reserve(demand, self.output_tokens(demand))

    def output_tokens(self, demand: Demand) -> int:
        """Tokens to reserve for the output, and for what prompts usually have beyond their estimate."""
        lengths = self.lengths
        return lengths.expected(demand.model, demand.tenant, demand.output_tokens) + lengths.prompt_excess_tokens(
            demand.model
        )

    def is_large_enough(self, engine: Engine, demand: Demand) -> bool:
        """Whether it could run this request if it were idle."""
        return self.slots_of(demand, engine) <= engine.cap

    def slots_of(self, demand: Demand, engine: Engine) -> int:
        """Slots that the request takes there; a divisible one takes at most all of them."""
        wanted = demand.sequences
        return engine.cap if demand.divisible and wanted > engine.cap else wanted

    def emptiest(self, demand: Demand, engines: list[Engine]) -> Engine:
        """The engine that will have capacity for the request first."""
        return min(
            engines,
            key=lambda engine: (
                not self.is_large_enough(engine, demand),
                engine.load.in_flight / engine.slots,
                engine.index,
            ),
        )


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
        if not self.is_open[column] or (guarded and not self._is_open_to_guarded(ticket, column, now)):
            self.ranking.keep_waiting(row, column)
        elif self.capacity.admits(self.engines[column], ticket.demand, now, guarded=guarded):
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
            engines = [self.engines[column] for column in columns]
            column = columns[engines.index(self.capacity.emptiest(ticket.demand, engines))]
            if guarded and not self.all_guarded:
                self._kept.add(column)
            else:
                self.ranking.close(column)
                self.is_open[column] = False

    def _is_guarded(self, ticket: Ticket) -> bool:
        return self.all_guarded or (self.is_over_share is not None and self.is_over_share(ticket))

    def _is_open_to_guarded(self, ticket: Ticket, column: int, now: float) -> bool:
        engine = self.engines[column]
        return column not in self._kept and self.capacity.is_open(engine, ticket.demand.model, now, guarded=True)

    def _bind(self, row: int, ticket: Ticket, column: int, now: float) -> None:
        self.bind(ticket, column, self.ranking.prefill(row, column))
        self.ranking.bound(column)
        self.is_open[column] = self.capacity.is_open(
            self.engines[column], ticket.demand.model, now, guarded=self.all_guarded
        )


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
