"""The queue: one queue a model, in fair order, within the bounds of all that waits, and how long the wait will be.

Fair order: over tenants by tokens served, within a tenant by least prefill, aged. Interactive requests come before
batch requests. Batch requests that starve take part among the interactive ones, together as one more tenant.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count, islice
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from gateway.errors import DeadlineUnmeetable, QueueFull
from gateway.request import Ask
from gateway.routing.cost_matrix import Hit
from gateway.scheduling.backlog import Backlog, ServiceRates
from gateway.scheduling.fair_share import FairClock, Share, Tenant, Tenants, expected_tokens

_NO_HITS: Hit = np.zeros(0)


class Ticket:
    """One waiting request."""

    __slots__ = (
        "arrived_seconds", "ask", "avoid", "goes_anywhere", "hits", "hits_of", "hits_seconds", "late_seconds",
        "opening", "prefill_seconds", "tokens", "turn",
    )  # fmt: skip

    def __init__(self, ask: Ask, arrived_seconds: float, avoid: frozenset[str], prefill_seconds: float) -> None:
        self.ask = ask
        self.arrived_seconds = arrived_seconds
        self.avoid = avoid
        self.goes_anywhere = not avoid and ask.pinned is None and ask.rank is None and ask.sequences == 1
        self.prefill_seconds = prefill_seconds  # on the backend that holds most of its prompt
        # When even the least prefill would end after its deadline.
        self.late_seconds = inf if ask.deadline_seconds is None else ask.deadline_seconds - prefill_seconds
        self.turn = prefill_seconds  # who comes first: the least prefill, and what was waited for counts against it
        self.tokens = expected_tokens(ask, 0, 0.0)  # that it will take of its tenant's share
        self.opening = ask.keys[0] if ask.keys else 0
        self.hits = _NO_HITS  # predicted, for each of the engines `hits_of`, at `hits_seconds`
        self.hits_of: object = None
        self.hits_seconds = 0.0


# A share with waiting requests: when the first of them starts, what decides between equal starts, weight, and these.
Contender = tuple[float, float, float, Iterator[Ticket]]

_FURTHER_SECONDS = 0.05  # between looks that go further
_FURTHER = 4  # times as many are looked at then
_LEAST_WINDOW = 8  # of a tenant's requests are put in order, however many tenants wait


class TenantQueue:
    """The waiting requests of one tenant and class, oldest first."""

    __slots__ = ("age", "batch", "number", "tenant", "tickets")

    def __init__(self, tenant: Tenant, number: int, *, batch: bool) -> None:
        self.tenant = tenant
        self.number = number  # of the line's flows, in the order in which they began to wait
        self.age: tuple[float, int, TenantQueue] | None = None  # its entry among those that do not starve
        self.batch = batch
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()

    @property
    def since_seconds(self) -> float:
        return next(iter(self.tickets)).arrived_seconds

    def parts(self, order: "Order", count: int) -> tuple[list[Ticket], list[Ticket]]:
        """Of the oldest, those who starve and the others, each by their turn."""
        tickets, since, starving = list(islice(self.tickets, count)), order.starving_since_seconds, 0
        while starving < len(tickets) and tickets[starving].arrived_seconds < since:
            starving += 1
        if not order.by_turn:
            return tickets[:starving], tickets[starving:]
        return sorted(tickets[:starving], key=_turn), sorted(tickets[starving:], key=_turn)

    def in_order(self, order: "Order", count: int) -> list[Ticket]:
        starving, others = self.parts(order, count)
        return starving + others


class Order(NamedTuple):
    """How a look at `scan` of the line is made, from place `start` on.

    `by_turn`: within a tenant; else the oldest come first.
    """

    scan: int
    starving_since_seconds: float
    by_turn: bool
    start: int = 0


class ModelQueue:
    """One model's."""

    def __init__(self, tenants: Tenants, began_seconds: float) -> None:
        self.tenants = tenants
        self.began_seconds = began_seconds
        self.served = 0  # since then
        self._flows: dict[tuple[str, bool], TenantQueue] = {}
        self._aged = Share(1.0, 0.0)  # of the batch requests that starve
        self._aged_wait = False
        self._numbers = count()
        self._ages: list[
            tuple[float, int, TenantQueue]
        ] = []  # of batch requests that do not starve: when the oldest came
        self._further = 0  # the place at which the next look that goes further begins
        self._further_seconds = -inf  # when the last one was made

    def __len__(self) -> int:
        return self.tenants.waiting

    def __iter__(self) -> Iterator[Ticket]:
        for flow in self._flows.values():
            yield from flow.tickets

    @property
    def flows(self) -> Iterable[TenantQueue]:
        return self._flows.values()

    def join(self, ticket: Ticket) -> None:
        ask = ticket.ask
        flow = self._flows.get((ask.tenant, ask.batch))
        if flow is None:
            tenant = self.tenants.of(ask)
            flow = self._flows[ask.tenant, ask.batch] = TenantQueue(tenant, next(self._numbers), batch=ask.batch)
            clock, share = self.tenants.clocks[ask.batch], tenant.shares[ask.batch]
            clock.wake(share)
            clock.waiting.join(share, flow.number, flow)
            self.tenants.flow_began_seconds = ticket.arrived_seconds
            self.tenants.waiting_tenants += not tenant.waiting
        flow.tickets[ticket] = None
        if ask.batch and len(flow.tickets) == 1:
            self._note_age(flow)
        flow.tenant.waiting += 1
        self.tenants.waiting += 1
        self.tenants.waiting_batch += ask.batch

    def leave(self, ticket: Ticket) -> bool:
        """Give the place back; False if it was given back before."""
        ask = ticket.ask
        flow = self._flows.get((ask.tenant, ask.batch))
        if flow is None or ticket not in flow.tickets:
            return False
        is_oldest = ask.batch and next(iter(flow.tickets)) is ticket
        del flow.tickets[ticket]
        if is_oldest:
            self._forget_age(flow)
        if not flow.tickets:
            del self._flows[ask.tenant, ask.batch]
            self.tenants.clocks[ask.batch].waiting.leave(flow.tenant.shares[ask.batch])
        elif is_oldest:
            self._note_age(flow)
        flow.tenant.waiting -= 1
        self.tenants.waiting_tenants -= not flow.tenant.waiting
        self.tenants.waiting -= 1
        self.tenants.waiting_batch -= ask.batch
        return True

    def in_order(self, order: Order) -> list[Ticket]:
        if len(self._flows) == 1:
            self._aged_wait = False
            [flow] = self._flows.values()
            return flow.in_order(order, order.scan)
        window = max(_LEAST_WINDOW, 2 * order.scan // max(1, len(self._flows)))
        interactive, batch = self.tenants.clocks
        aged = merged(self._starving(order, window), order.scan)
        if aged and not self._aged_wait:
            interactive.wake(self._aged)
        self._aged_wait = bool(aged)
        contenders = _contenders(interactive, order, window)
        last = ((interactive.start(self._aged), inf, self._aged.weight, iter(aged)),) if aged else ()
        tickets = merged(contenders, order.scan, *last)
        if len(tickets) == order.scan:
            return tickets
        return tickets + merged(_contenders(batch, order, window), order.scan - len(tickets))

    def further(self, order: Order, now: float) -> Order | None:
        """Those to ask when the first leave an engine idle, because they hold out for others; None = not so soon.

        Each time it is more of the line, until all were asked; what a look may cost has a bound.
        """
        if now - self._further_seconds < _FURTHER_SECONDS:
            return None
        start, scan = self._further if self._further < len(self) else 0, _FURTHER * order.scan
        self._further, self._further_seconds = start + scan, now
        return order._replace(start=start, scan=scan)

    def serve(self, ticket: Ticket, order: Order) -> None:
        """A request goes to an engine: one of batch that starved was served among the interactive ones, too."""
        self.served += 1
        if self._aged_wait and ticket.ask.batch and ticket.arrived_seconds < order.starving_since_seconds:
            self.tenants.clocks[0].serve(self._aged, ticket.tokens)

    def ahead(self, ask: Ask) -> int:
        """About how many will be served before a new request, if all take as many tokens."""
        own = self._flows.get((ask.tenant, ask.batch))
        places = 1 if own is None else len(own.tickets) + 1
        count = places - 1
        for flow in self._flows.values():
            if flow.batch < ask.batch:
                count += len(flow.tickets)
            elif flow.batch == ask.batch and flow is not own:
                count += min(len(flow.tickets), ceil(places * flow.tenant.weight / ask.weight))
        return count

    def _starving(self, order: Order, window: int) -> Iterator[Contender]:
        """The batch requests that starve, by tenant."""
        clock, ages, since = self.tenants.clocks[1], self._ages, order.starving_since_seconds
        while ages and ages[0][0] < since:
            flow = ages[0][2]
            self._forget_age(flow)
            self._note_age(flow, since)
        for start, number, weight, flow in clock.starving.after(clock.now):
            yield start, number, weight, iter(flow.parts(order, window)[0])

    def _note_age(self, flow: TenantQueue, starving_since_seconds: float = -inf) -> None:
        """Keep when a flow of batch requests begins to starve, or that it does."""
        share, starving = flow.tenant.shares[True], self.tenants.clocks[True].starving
        if flow.since_seconds < starving_since_seconds:
            starving.join(share, flow.number, flow)
        else:
            flow.age = flow.since_seconds, flow.number, flow
            insort(self._ages, flow.age)

    def _forget_age(self, flow: TenantQueue) -> None:
        if flow.age is None:
            self.tenants.clocks[True].starving.leave(flow.tenant.shares[True])
        else:
            del self._ages[bisect_left(self._ages, flow.age)]
            flow.age = None


def merged(contenders: Iterator[Contender], count: int, *others: Contender) -> list[Ticket]:
    """The first so many: who starts first comes first, as if each were bound in turn.

    Contenders come in order of their start, and no more of them are asked for than have a ticket among these; others
    come in any order.
    """
    heap, found = list(others), list[Ticket]()
    coming = next(contenders, None)
    while len(found) < count:
        while coming is not None and (not heap or coming < heap[0]):
            heappush(heap, coming)
            coming = next(contenders, None)
        if not heap:
            break
        start, number, weight, tickets = heap[0]
        ticket = next(tickets, None)
        if ticket is None:
            heappop(heap)
        else:
            found.append(ticket)
            heapreplace(heap, (start + ticket.tokens / weight, number, weight, tickets))
    return found


def _contenders(clock: FairClock, order: Order, count: int) -> Iterator[Contender]:
    """All flows of a class by their turn; those that starve in the other class have only the rest here."""
    for start, number, weight, flow in clock.waiting.after(clock.now):
        yield start, number, weight, _tickets(flow, order, count)


def _tickets(flow: TenantQueue, order: Order, count: int) -> Iterator[Ticket]:
    """The first `count` in order, and if its weight gives it more of a look, the oldest of those after them."""
    if flow.batch and flow.since_seconds < order.starving_since_seconds:
        yield from flow.parts(order, count)[1]
        return
    yield from flow.in_order(order, count)
    yield from islice(flow.tickets, count, order.scan)


_turn = attrgetter("turn")


_MOST_MODELS = 1024  # more are kept only while they are in use


class Queue:
    """Owner of who waits. What waits elsewhere is counted in its `backlog`, too."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.backlog = Backlog(max_requests, max_bytes)
        self._lines: dict[str, ModelQueue] = {}
        self._tenants: dict[str, Tenants] = {}
        self._requests = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._requests

    def __repr__(self) -> str:
        lines = ", ".join(f"{model} {len(line)}" for model, line in self._lines.items())
        return f"<Queue {self._requests} waiting, {self._bytes} bytes: {lines or 'empty'}>"

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def tenants(self, model: str) -> Tenants:
        """A model's tenants, whether they wait or not."""
        tenants = self._tenants.get(model)
        if tenants is None:
            if len(self._tenants) >= _MOST_MODELS:
                self._forget_idle()
            tenants = self._tenants[model] = Tenants()
        return tenants

    def _forget_idle(self) -> None:
        """Clients name models, also such as do not exist: what is known of those that nobody uses is dropped."""
        for model, tenants in list(self._tenants.items()):
            if not tenants.waiting and not tenants.in_flight:
                del self._tenants[model]

    def waiting(self, model: str) -> int:
        """How many wait for a model."""
        line = self._lines.get(model)
        return 0 if line is None else len(line)

    def models(self) -> list[str]:
        return list(self._lines)

    def line(self, model: str) -> ModelQueue | None:
        """The line of a model that somebody waits for."""
        return self._lines.get(model)

    def in_order(self, model: str, order: Order) -> list[Ticket]:
        """The first tickets of a model's line."""
        line = self._lines.get(model)
        return [] if line is None else line.in_order(order)

    def __iter__(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            yield from line

    def join(self, ticket: Ticket, retry_after_seconds: float) -> None:
        ask = ticket.ask
        tenants = self.tenants(ask.model)
        self.refuse_if_full(ask, ticket.arrived_seconds, retry_after_seconds)
        line = self._lines.get(ask.model)
        if line is None:
            line = self._lines[ask.model] = ModelQueue(tenants, ticket.arrived_seconds)
        line.join(ticket)
        self._requests += 1
        self._bytes += ask.size_bytes
        self.backlog.join(ask.size_bytes)

    def refuse_if_full(self, ask: Ask, now: float, retry_after_seconds: float) -> None:
        """Raises QueueFull when as many requests or bytes wait as may.

        The last places are kept from a tenant that has more than its share of them, while others have been there.
        """
        tenants = self.tenants(ask.model)
        if self.backlog.is_full_for(ask.size_bytes, guarded=tenants.waits_much(tenants.of(ask), now)):
            raise QueueFull(
                f"The queue is full: all backends for model {ask.model!r} are busy and {self.backlog.requests} requests"
                " are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=retry_after_seconds,
            )

    def serve(self, ticket: Ticket, order: Order) -> None:
        """A ticket's request goes to an engine."""
        line = self._lines.get(ticket.ask.model)
        if line is not None:
            line.serve(ticket, order)
        self.leave(ticket)

    def leave(self, ticket: Ticket) -> bool:
        """Give the place back; False if it was given back before."""
        line = self._lines.get(ticket.ask.model)
        if line is None or not line.leave(ticket):
            return False
        if not len(line):
            del self._lines[ticket.ask.model]
        self._requests -= 1
        self._bytes -= ticket.ask.size_bytes
        self.backlog.leave(ticket.ask.size_bytes)
        return True


_ENOUGH_SERVED = 16  # of those who have waited since the line began: fewer tell nothing of how fast it moves
_DOUBT = 2.0  # nobody is sent away for a wait that is less than so much too long


class WaitEstimator:
    """Looks at the line and at how fast it moves."""

    def __init__(self, queue: Queue, rates: ServiceRates) -> None:
        self._queue = queue
        self._rates = rates

    def wait_seconds(self, ask: Ask, now: float) -> float | None:
        """The expected wait of a request that joins now; None = it cannot be told yet.

        Places come free at the rate at which requests leave; while few have waited, that is the rate at which they
        came. So those must have moved on who waited in this line, and the better of both rates counts.
        """
        line = self._queue.line(ask.model)
        if line is None or line.served < _ENOUGH_SERVED:
            return None
        places = line.ahead(ask) + 1
        by_line = places * (now - line.began_seconds) / line.served
        return min(by_line, self._rates.seconds_for(ask.model, places, now))

    def service_rate(self, model: str, now: float) -> float | None:
        """Requests a second that give their place back; None = not known yet."""
        return self._rates.per_second(model, now)

    def refuse_late(self, ticket: Ticket, now: float, retry_after: Callable[[], float]) -> None:
        """Raises DeadlineUnmeetable if the deadline cannot be met: a wait must be twice as long as what is left."""
        left = ticket.late_seconds - now
        wait = self.wait_seconds(ticket.ask, now) or 0.0
        if left < 0 or wait > _DOUBT * left:
            raise DeadlineUnmeetable(
                f"All backends for model {ticket.ask.model!r} are busy, and none will have free capacity in time for"
                " this request's deadline.",
                retry_after_seconds=retry_after(),
            )
