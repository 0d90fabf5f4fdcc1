"""Placement: which backend a request is bound to, and when. Pure: values in, decisions out, time passed in.

A request goes to its best backend if that one is open; else it waits in line. When anything changes, the line is looked
through, cheapest prefill first, aged by waiting: each request is bound if its own best backend is open, and holds out
for it otherwise, while others overtake. What it holds out for counts as load for those behind it. Nobody waits longer
than `starvation_seconds` for the best: then any open backend will do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.admission.drain_rate import DrainRate
from gateway.admission.queue import Queue, Ticket
from gateway.errors import InvalidRequest, ModelNotFound, NoBackend
from gateway.request import Ask
from gateway.routing.calibration import Calibration
from gateway.routing.cost import step_seconds
from gateway.routing.estimate import Estimates
from gateway.routing.load import Load, Work
from gateway.routing.policy import Option, Policy, Seat


class Candidate(Protocol):
    """What placement asks of a backend."""

    name: str
    index: int
    speed: float
    cap: int
    kv_cache_tokens: int | None

    @property
    def caches_prefixes(self) -> bool:
        """Whether a prompt sent there before is still of use."""

    def limit(self, now_seconds: float) -> int:
        """Sequences that it may have in flight now."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Settings of placement; see the configuration's `routing`."""

    aging: float = 0.05
    kv_headroom: float = 0.97
    scan: int = 64
    starvation_seconds: float = 30.0


@dataclass(slots=True, eq=False)
class Binding:
    """A request bound to a backend: what it takes there until it is released."""

    seat: Seat
    work: Work
    hit_tokens: int
    waited_seconds: float
    released: bool = False


class Placement:
    """Owner of what is taken on each backend."""

    def __init__(
        self,
        serving: Callable[[str], Sequence[Candidate] | None],
        policy: Policy,
        queue: Queue,
        estimates: Estimates,
        calibration: Calibration,
        knobs: Knobs,
    ) -> None:
        self._serving = serving
        self._policy = policy
        self._queue = queue
        self._estimates = estimates
        self._calibration = calibration
        self._knobs = knobs
        self._drain_rate = DrainRate()
        self._seats: dict[str, Seat] = {}
        self._views: dict[str, list[Seat]] = {}  # by model, until the fleet changes

    def __repr__(self) -> str:
        seats = ", ".join(f"{seat.name} {seat.load.in_flight}/{seat.slots}" for seat in self._seats.values())
        return f"<Placement {seats or 'no seats'}; {len(self._queue)} waiting>"

    @property
    def seats(self) -> list[Seat]:
        """Every backend that was ever considered."""
        return list(self._seats.values())

    def load(self, backend: str) -> Load:
        """What is in flight on a backend; nothing, if none was ever placed there."""
        seat = self._seats.get(backend)
        return seat.load if seat is not None else Load()

    def place(self, ask: Ask, now: float, avoid: frozenset[str] = frozenset()) -> Binding | Ticket:
        """Bind a new request at once, or give it a place in the line.

        Raises ModelNotFound, NoBackend, QueueFull, or InvalidRequest if it can never fit.
        """
        seats = self._candidates(ask, now, avoid)
        if ask.sequences == 0:
            return self._bind(ask, Option(min(seats, key=lambda seat: seat.load.in_flight), 0.0, 0.0, 0), now, 0.0)
        if ask.sequences > 1:
            self._refuse_what_never_fits(ask, seats)
        options = self._policy.options(ask, seats, now)
        if not self._queue.waiting(ask.model):
            option = self._best(ask, options, {}, now, any_open=not self._policy.waits_for_best)
            if option is not None and self._admits(option, ask, now):
                return self._bind(ask, option, now, 0.0)
        ticket = Ticket(ask, now, avoid, min(option.prefill_seconds for option in options))
        self._queue.join(ticket, self.retry_after_seconds(now))
        return ticket

    def drain(self, model: str, now: float) -> list[tuple[Ticket, Binding | NoBackend]]:
        """Bind whoever can be bound now; they leave the line. NoBackend for those whom nobody can serve any more."""
        granted: list[tuple[Ticket, Binding | NoBackend]] = []
        virtual: dict[int, float] = {}  # by backend: seconds of prefill that others hold out for
        kept: set[int] = set()  # backends that nobody else is given until they have room for one who starves
        for ticket in self._in_order(model, now):
            try:
                seats = self._candidates(ticket.ask, now, ticket.avoid)
            except (NoBackend, ModelNotFound) as error:
                self._queue.leave(ticket)
                granted.append((ticket, NoBackend(error.message, retry_after_seconds=error.retry_after_seconds)))
                continue
            if kept:
                seats = [seat for seat in seats if seat.index not in kept]
            waited = now - ticket.arrived_seconds
            starving = waited > self._knobs.starvation_seconds
            if not starving and not any(self._is_open(seat, ticket.ask, now) for seat in seats):
                continue
            any_open = not self._policy.waits_for_best or starving
            options = self._policy.options(ticket.ask, seats, now)
            option = self._best(ticket.ask, options, virtual, now, any_open=any_open)
            if option is not None and self._admits(option, ticket.ask, now):
                self._queue.leave(ticket)
                granted.append((ticket, self._bind(ticket.ask, option, now, waited)))
            elif starving and seats:
                kept.add(self._emptiest(ticket.ask, seats).index)
            elif option is not None:
                virtual[option.seat.index] = virtual.get(option.seat.index, 0.0) + option.prefill_seconds
        return granted

    def retry_after_seconds(self, now: float) -> float:
        """When a place may come free for one who is not in the line."""
        return self._drain_rate.seconds_for(len(self._queue) + 1, now)

    def first_token(self, binding: Binding, now: float) -> None:
        """The request's prefill is over."""
        work = binding.work
        if not binding.released and binding.seat.load.first_token(work, now) and work.alone:
            self._calibration.first_token(work.uncached_tokens, work.first_token_seconds, now - work.started_seconds)

    def release(self, binding: Binding, now: float, *, answered: bool = False) -> None:
        """Give back everything the request took. Only the first call counts. `answered`: it got its whole answer."""
        if binding.released:
            return
        binding.released = True
        self._drain_rate.left(now)
        work = binding.work
        binding.seat.load.finish(work, now)
        if answered and work.alone and not work.observable:
            self._calibration.at_most(work.uncached_tokens, work.first_token_seconds, now - work.started_seconds)

    def refresh(self) -> None:
        """The fleet has changed: look at it again."""
        self._views.clear()

    def _candidates(self, ask: Ask, now: float, avoid: frozenset[str]) -> list[Seat]:
        """The seats of the backends that may take this request. Raises ModelNotFound or NoBackend."""
        seats = self._views.get(ask.model)
        if seats is None:
            seats = self._view(ask.model, now)
        if ask.pinned is not None:
            seats = [seat for seat in seats if seat.name == ask.pinned]
        elif avoid:
            seats = [seat for seat in seats if seat.name not in avoid] or seats
        if not seats:
            raise NoBackend(f"No backend of model {ask.model!r} is available now.", retry_after_seconds=2.0)
        return seats

    def _view(self, model: str, now: float) -> list[Seat]:
        backends = self._serving(model)
        if backends is None:
            raise ModelNotFound(
                f"The model {model!r} does not exist here. GET /v1/models lists those that do.", param="model"
            )
        seats = self._views[model] = [self._seat(backend, now) for backend in backends]
        return seats

    def _seat(self, backend: Candidate, now: float) -> Seat:
        seat = self._seats.get(backend.name)
        if seat is None:
            seat = self._seats[backend.name] = Seat(backend.index, backend.name, slowness=backend.speed**0.5)
        seat.cap = backend.cap
        seat.slots = backend.limit(now)
        seat.kv_cache_tokens = backend.kv_cache_tokens
        seat.caches_prefixes = backend.caches_prefixes
        return seat

    def _refuse_what_never_fits(self, ask: Ask, seats: Sequence[Seat]) -> None:
        largest = max(seat.cap for seat in seats)
        if ask.sequences > largest and not ask.divisible:
            raise InvalidRequest(
                f"This request asks for {ask.sequences} sequences at once (n x prompts); no backend of model"
                f" {ask.model!r} runs more than {largest}. Send fewer in one request.",
                param="n",
            )

    def _in_order(self, model: str, now: float) -> list[Ticket]:
        """The oldest tickets; those that starve first, then by cost less what waiting is worth."""
        tickets = self._queue.oldest(model, self._knobs.scan)
        if not self._policy.waits_for_best:
            return tickets

        def rank(ticket: Ticket) -> tuple[bool, float]:
            waited = now - ticket.arrived_seconds
            return waited <= self._knobs.starvation_seconds, ticket.prefill_seconds - self._knobs.aging * waited

        return sorted(tickets, key=rank)

    def _best(
        self, ask: Ask, options: Sequence[Option], virtual: dict[int, float], now: float, *, any_open: bool
    ) -> Option | None:
        """The cheapest option, counting what others hold out for; of all of them, or of those that admit it now."""
        best: Option | None = None
        least = 0.0
        for option in options:
            seat = option.seat
            if any_open and not self._admits(option, ask, now):
                continue
            cost = option.cost + virtual.get(seat.index, 0.0) if virtual else option.cost
            if best is None or cost < least or (cost == least and _is_quieter(seat, best.seat)):
                best, least = option, cost
        return best

    def _emptiest(self, ask: Ask, seats: Sequence[Seat]) -> Seat:
        """The backend that will have room for it first."""
        return min(
            seats, key=lambda seat: (self._slots_of(ask, seat) > seat.cap, seat.load.in_flight / seat.slots, seat.index)
        )

    def _is_open(self, seat: Seat, ask: Ask, now: float) -> bool:
        wanted = self._slots_of(ask, seat)
        if seat.load.in_flight + wanted > seat.slots:
            # a request larger than a slow start allows may run alone
            return seat.load.in_flight == 0 and wanted <= seat.cap
        return seat.load.prefill_ahead_seconds(now) <= self._calibration.window_seconds

    def _admits(self, option: Option, ask: Ask, now: float) -> bool:
        return self._is_open(option.seat, ask, now) and self._fits(option, ask)

    def _fits(self, option: Option, ask: Ask) -> bool:
        """Its prompt and answer fit into the KV cache beside what runs there. A backend that is idle takes anything."""
        seat = option.seat
        if seat.kv_cache_tokens is None or seat.load.in_flight == 0:
            return True
        needed = ask.prompt_tokens + ask.sequences * self._output_tokens(ask)
        return seat.load.reserved_tokens + needed <= self._knobs.kv_headroom * seat.kv_cache_tokens

    def _output_tokens(self, ask: Ask) -> int:
        expected, told = int(self._estimates.output_tokens), ask.output_tokens
        return expected if told is None or told > expected else told

    def _slots_of(self, ask: Ask, seat: Seat) -> int:
        wanted = ask.sequences
        return seat.cap if ask.divisible and wanted > seat.cap else wanted

    def _bind(self, ask: Ask, option: Option, now: float, waited_seconds: float) -> Binding:
        seat = option.seat
        uncached = max(0, ask.prompt_tokens - option.hit_tokens)
        reserved = uncached + ask.sequences * self._output_tokens(ask)
        first_token = option.prefill_seconds + step_seconds(self._calibration.model, seat.slowness, seat.load)
        work = Work(
            self._slots_of(ask, seat),
            ask.prompt_tokens,
            reserved,
            option.prefill_seconds,
            ask.streams,
            uncached,
            first_token,
        )
        seat.load.start(work, now)
        seat.placed += 1
        self._policy.placed(ask, option)
        return Binding(seat, work, option.hit_tokens, waited_seconds)


def _is_quieter(seat: Seat, other: Seat) -> bool:
    """Of two backends at the same cost, the one with less in flight, then the one that was chosen less often."""
    return (seat.load.in_flight, seat.placed) < (other.load.in_flight, other.placed)
