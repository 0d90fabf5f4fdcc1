"""The waiting requests of each model in fair order, the limit of the backlog, and wait estimates.

Fair order: over tenants by tokens served, within a tenant by least prefill, aged. Interactive requests come before
batch requests. Batch requests that starve take part among the interactive ones, together as one more tenant.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from math import ceil, inf
from operator import attrgetter
from typing import Final

from gateway.errors import DeadlineUnmeetable, QueueFull
from gateway.request import Demand
from gateway.routing.engine import Engine
from gateway.scheduling.fair_share import UNKNOWN_SECONDS, Backlog, FairClock, Share, Tenant, Tenants, expected_tokens

_turn, _arrived = attrgetter("turn"), attrgetter("arrived_seconds")


class Ticket:
    """One waiting request."""

    __slots__ = (
        "arrived_seconds", "avoid", "demand", "goes_anywhere", "late_seconds", "prefill_seconds",
        "tokens", "turn", "waits_among", "waits_for", "waits_seconds", "waits_until",
    )  # fmt: skip

    def __init__(self, demand: Demand, arrived_seconds: float, avoid: frozenset[str], prefill_seconds: float) -> None:
        self.demand = demand
        self.arrived_seconds = arrived_seconds
        self.avoid = avoid
        self.goes_anywhere = not avoid and demand.pinned is None and demand.rank is None and demand.sequences == 1
        self.prefill_seconds = prefill_seconds  # on the engine that holds most of its prompt
        # When even the least prefill would end after its deadline.
        self.late_seconds = inf if demand.deadline_seconds is None else demand.deadline_seconds - prefill_seconds
        self.turn = prefill_seconds  # least first within a tenant; the scheduler adds the arrival time, weighted
        self.tokens = expected_tokens(demand, 0, 0.0)  # charged to its tenant's share
        self.waits_for = 0  # position of its best engine in `waits_among`, `waits_until` that time
        self.waits_among: Sequence[Engine] = ()
        self.waits_seconds = self.waits_until = 0.0  # the former: of its prefill there

    def enqueue(self, turn: float, tokens: float) -> None:
        """Set its place among its tenant's requests, and what it is charged."""
        self.turn, self.tokens = turn, tokens

    def choose(self, at: int, prefill_seconds: float, among: Sequence[Engine], until: float) -> None:
        """Remember its best engine, by its position among these."""
        self.waits_for, self.waits_seconds, self.waits_among, self.waits_until = at, prefill_seconds, among, until


_FURTHER_SECONDS: Final = 0.05  # between two longer scans
_FURTHER: Final = 4  # how much longer they are
_LEAST_WINDOW: Final = 8  # of a tenant's requests are put in order, however many tenants wait


class ScanOrder:
    """Which part of a model's queue to scan: `scan` tickets from position `start` on.

    `by_turn`: tickets of one tenant are ordered by their turn; otherwise the oldest come first.
    """

    __slots__ = ("by_turn", "scan", "start", "starving_since_seconds")

    def __init__(self, scan: int, starving_since_seconds: float, by_turn: bool, start: int = 0) -> None:
        self.scan = scan
        self.starving_since_seconds = starving_since_seconds
        self.by_turn = by_turn
        self.start = start


class _Window:
    """The oldest tickets of a tenant queue: those that starve, and the others, each in order."""

    __slots__ = ("_by_turn", "_count", "_since_seconds", "_until_seconds", "others", "starving")

    def __init__(self, oldest: list[Ticket], order: ScanOrder, count: int) -> None:
        since, starving = order.starving_since_seconds, 0
        if oldest and oldest[0].arrived_seconds < since:
            starving = bisect_left(oldest, since, key=_arrived)
        self.starving, self.others = oldest[:starving], oldest[starving:]
        self._count, self._by_turn, self._since_seconds = count, order.by_turn, since
        self._until_seconds = self.others[0].arrived_seconds if self.others else inf
        if order.by_turn:
            self.starving.sort(key=_turn)
            self.others.sort(key=_turn)

    def is_valid(self, order: ScanOrder, count: int) -> bool:
        """Whether it is the same for this order and count."""
        is_same = self._count == count and self._by_turn == order.by_turn
        return is_same and self._since_seconds <= order.starving_since_seconds <= self._until_seconds


class TenantQueue:
    """The waiting requests of one tenant and class, oldest first."""

    __slots__ = ("age", "batch", "number", "tenant", "tickets", "window")

    def __init__(self, tenant: Tenant, number: int, *, batch: bool) -> None:
        self.tenant = tenant
        self.number = number  # in the order in which the model's tenant queues began to wait
        self.age: tuple[float, int, TenantQueue] | None = None  # its entry among those that do not starve
        self.batch = batch
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.window: _Window | None = None  # until a ticket comes or leaves

    @property
    def since_seconds(self) -> float:
        return next(iter(self.tickets)).arrived_seconds

    def parts(self, order: ScanOrder, count: int) -> tuple[list[Ticket], list[Ticket]]:
        """The oldest `count` tickets: those that starve, and the others, each in order."""
        window = self.window
        if window is None or not window.is_valid(order, count):
            window = self.window = _Window(list(islice(self.tickets, count)), order, count)
        return window.starving, window.others

    def in_order(self, order: ScanOrder, count: int) -> list[Ticket]:
        starving, others = self.parts(order, count)
        return starving + others if starving else others


class _Contender:
    """A share with waiting requests: the virtual start of the next one, and these requests in order.

    After `tickets` the oldest others of the queue follow, up to `most`: its weight may give it more of the scan.
    """

    __slots__ = ("_flow", "_most", "_number", "_start", "_taken", "_tickets", "_weight")

    def __init__(
        self, start: float, weight: float, tickets: list[Ticket], flow: TenantQueue | None = None, most: int = 0
    ) -> None:
        self._start = start
        self._number = inf if flow is None else float(flow.number)  # decides between equal starts
        self._weight = weight
        self._tickets = tickets
        self._taken = 0
        self._flow = flow
        self._most = most

    def is_before(self, other: "_Contender") -> bool:
        return self._start < other._start or (self._start == other._start and self._number < other._number)

    def take(self) -> Ticket:
        """Its next request, which is as if it were bound."""
        ticket = self._tickets[self._taken]
        self._taken += 1
        self._start += ticket.tokens / self._weight
        return ticket

    def has_more(self) -> bool:
        """Whether `take` may be called again."""
        taken, flow = self._taken, self._flow
        if taken == len(self._tickets) < self._most and flow is not None and taken < len(flow.tickets):
            self._tickets = self._tickets + list(islice(flow.tickets, taken, self._most))
            self._most = 0
        return taken < len(self._tickets)


class ModelQueue:
    """The waiting requests of one model, in a queue for each tenant and class."""

    def __init__(self, tenants: Tenants, began_seconds: float) -> None:
        self.tenants = tenants
        self.began_seconds = began_seconds
        self.served = 0  # since then
        self.restricted = 0  # requests that may not use every engine
        self._flows: dict[tuple[str, bool], TenantQueue] = {}
        self._aged = Share(1.0, 0.0)  # of the batch requests that starve
        self._aged_wait = False
        self._numbers = count()
        # of batch requests that do not starve: when the oldest came
        self._ages: list[tuple[float, int, TenantQueue]] = []
        self._further = 0  # start of the next longer scan
        self._further_seconds = -inf  # time of the last one

    def __len__(self) -> int:
        return self.tenants.waiting

    def __iter__(self) -> Iterator[Ticket]:
        for flow in self._flows.values():
            yield from flow.tickets

    @property
    def flows(self) -> Iterable[TenantQueue]:
        return self._flows.values()

    def join(self, ticket: Ticket) -> None:
        demand = ticket.demand
        flow = self._flows.get((demand.tenant, demand.batch))
        if flow is None:
            tenant = self.tenants.of(demand)
            flow = self._flows[demand.tenant, demand.batch] = TenantQueue(
                tenant, next(self._numbers), batch=demand.batch
            )
            clock, share = self.tenants.clocks[demand.batch], tenant.shares[demand.batch]
            clock.wake(share)
            clock.waiting.join(share, flow.number, flow)
            self.tenants.flow_began_seconds = ticket.arrived_seconds
        flow.tickets[ticket], flow.window = None, None
        self.restricted += not ticket.goes_anywhere
        if demand.batch and len(flow.tickets) == 1:
            self._note_age(flow)
        self.tenants.queued(flow.tenant, batch=demand.batch)

    def leave(self, ticket: Ticket) -> bool:
        """Remove a ticket; False if it was removed before."""
        demand = ticket.demand
        flow = self._flows.get((demand.tenant, demand.batch))
        if flow is None or ticket not in flow.tickets:
            return False
        is_oldest = demand.batch and next(iter(flow.tickets)) is ticket
        del flow.tickets[ticket]
        flow.window = None
        self.restricted -= not ticket.goes_anywhere
        if is_oldest:
            self._forget_age(flow)
        if not flow.tickets:
            del self._flows[demand.tenant, demand.batch]
            self.tenants.clocks[demand.batch].waiting.leave(flow.tenant.shares[demand.batch])
        elif is_oldest:
            self._note_age(flow)
        self.tenants.dequeued(flow.tenant, batch=demand.batch)
        return True

    def in_order(self, order: ScanOrder) -> list[Ticket]:
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
        last = _Contender(interactive.start(self._aged), self._aged.weight, aged) if aged else None
        tickets = merged(_contenders(interactive, order, window), order.scan, last)
        if len(tickets) == order.scan:
            return tickets
        return tickets + merged(_contenders(batch, order, window), order.scan - len(tickets))

    def further(self, order: ScanOrder, now: float) -> ScanOrder | None:
        """The next part of the queue to scan when the first part leaves an engine idle; None = too soon.

        Successive calls cover the whole queue; the cost of each scan is bounded.
        """
        if now - self._further_seconds < _FURTHER_SECONDS:
            return None
        start, scan = self._further if self._further < len(self) else 0, _FURTHER * order.scan
        self._further, self._further_seconds = start + scan, now
        return ScanOrder(scan, order.starving_since_seconds, order.by_turn, start)

    def serve(self, ticket: Ticket, order: ScanOrder) -> None:
        """A request goes to an engine. A batch request that starved is charged to the starving share, too."""
        self.served += 1
        if self._aged_wait and ticket.demand.batch and ticket.arrived_seconds < order.starving_since_seconds:
            self.tenants.clocks[0].serve(self._aged, ticket.tokens)

    def ahead(self, demand: Demand) -> int:
        """About how many requests will be served before a new one, if all take as many tokens."""
        own = self._flows.get((demand.tenant, demand.batch))
        places = 1 if own is None else len(own.tickets) + 1
        count = places - 1
        for flow in self._flows.values():
            if flow.batch < demand.batch:
                count += len(flow.tickets)
            elif flow.batch == demand.batch and flow is not own:
                count += min(len(flow.tickets), ceil(places * flow.tenant.weight / demand.weight))
        return count

    def _starving(self, order: ScanOrder, window: int) -> Iterator[_Contender]:
        """The batch requests that starve, by tenant."""
        clock, ages, since = self.tenants.clocks[1], self._ages, order.starving_since_seconds
        while ages and ages[0][0] < since:
            flow = ages[0][2]
            self._forget_age(flow)
            self._note_age(flow, since)
        for start, _, weight, flow in clock.starving.after(clock.now):
            if starving := flow.parts(order, window)[0]:
                yield _Contender(start, weight, starving, flow)

    def _note_age(self, flow: TenantQueue, starving_since_seconds: float = -inf) -> None:
        """Note when a queue of batch requests begins to starve, or that it starves now."""
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


def merged(contenders: Iterator[_Contender], count: int, other: _Contender | None = None) -> list[Ticket]:
    """The first `count` tickets by virtual start, as if each were bound in turn.

    `contenders` come in order of their start, and no more of them are read than have a ticket in the result.
    """
    found: list[Ticket] = []
    again: list[_Contender] = [] if other is None else [other]  # the next one last
    for coming in contenders:
        while again and len(found) < count and not coming.is_before(again[-1]):
            _take(again.pop(), found, again)
        if len(found) == count:
            return found
        _take(coming, found, again)
    while again and len(found) < count:
        _take(again.pop(), found, again)
    return found


def _take(contender: _Contender, found: list[Ticket], again: list[_Contender]) -> None:
    """Take its next request; if it has another one after that, its turn comes again."""
    found.append(contender.take())
    if contender.has_more():
        _insert(contender, again)


def _insert(contender: _Contender, among: list[_Contender]) -> None:
    """Insert it among those that are in order, the next one last."""
    low, high = 0, len(among)
    while low < high:
        middle = (low + high) // 2
        if contender.is_before(among[middle]):
            low = middle + 1
        else:
            high = middle
    among.insert(low, contender)


def _contenders(clock: FairClock, order: ScanOrder, count: int) -> Iterator[_Contender]:
    """All tenant queues of a class by virtual start, without the tickets that starve."""
    flow: TenantQueue
    for start, _, weight, flow in clock.waiting.after(clock.now):
        if flow.batch and flow.since_seconds < order.starving_since_seconds:
            if others := flow.parts(order, count)[1]:
                yield _Contender(start, weight, others, flow)
        else:
            yield _Contender(start, weight, flow.in_order(order, count), flow, order.scan)


_MOST_MODELS: Final = 1024  # idle ones beyond are forgotten
_ENOUGH_SERVED: Final = 16  # requests that waited in this queue: with fewer its rate is unknown
_DOUBT: Final = 2.0  # an expected wait refuses a request only if it is this many times too long


class Queue:
    """Owner of all waiting requests, and of each model's tenants. Requests that wait elsewhere count in its `backlog`,
    too. Waits are expected from a model's queue, and from the rate at which its requests release their slots."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.backlog = Backlog(max_requests, max_bytes)
        self.requests = 0
        self.size_bytes = 0
        self._queues: dict[str, ModelQueue] = {}
        self._tenants: dict[str, Tenants] = {}

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Ticket]:
        for queue in self._queues.values():
            yield from queue

    def __repr__(self) -> str:
        models = ", ".join(f"{model} {len(queue)}" for model, queue in self._queues.items())
        return f"<Queue {self.requests} waiting, {self.size_bytes} bytes: {models or 'empty'}>"

    def tenants(self, model: str) -> Tenants:
        tenants = self._tenants.get(model)
        if tenants is None:
            if len(self._tenants) >= _MOST_MODELS:  # clients name models that do not exist, too
                busy = {name: known for name, known in self._tenants.items() if known.waiting or known.in_flight}
                self._tenants = busy
            tenants = self._tenants[model] = Tenants()
        return tenants

    def waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return 0 if queue is None else len(queue)

    def models(self) -> list[str]:
        return list(self._queues)

    def of_model(self, model: str) -> ModelQueue | None:
        """The queue of a model; None if no request waits for it."""
        return self._queues.get(model)

    def join(self, ticket: Ticket) -> None:
        demand = ticket.demand
        self.refuse_if_full(demand, ticket.arrived_seconds)
        queue = self._queues.get(demand.model)
        if queue is None:
            queue = self._queues[demand.model] = ModelQueue(self.tenants(demand.model), ticket.arrived_seconds)
        queue.join(ticket)
        self.requests += 1
        self.size_bytes += demand.size_bytes
        self.backlog.join(demand.size_bytes)

    def refuse_if_full(self, demand: Demand, now: float) -> None:
        """Raises QueueFull when the limit of waiting requests or bytes is reached.

        A tenant over its share of the queue may not take the last places while others were active lately.
        """
        tenants = self.tenants(demand.model)
        if self.backlog.is_full_for(demand.size_bytes, guarded=tenants.waits_over_share(tenants.of(demand), now)):
            raise QueueFull(
                f"The queue is full: all backends for model {demand.model!r} are busy and {self.backlog.requests}"
                " requests are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=self.retry_after_seconds(demand.model, now),
            )

    def serve(self, ticket: Ticket, order: ScanOrder) -> None:
        queue = self._queues.get(ticket.demand.model)
        if queue is not None:
            queue.serve(ticket, order)
        self.leave(ticket)

    def leave(self, ticket: Ticket) -> bool:
        """Remove a ticket; False if it was removed before."""
        queue = self._queues.get(ticket.demand.model)
        if queue is None or not queue.leave(ticket):
            return False
        if not len(queue):
            del self._queues[ticket.demand.model]
        self.requests -= 1
        self.size_bytes -= ticket.demand.size_bytes
        self.backlog.leave(ticket.demand.size_bytes)
        return True

    def retry_after_seconds(self, model: str, now: float) -> float:
        """Expected time until a slot is free for a request behind all that wait."""
        tenants = self._tenants.get(model)
        return UNKNOWN_SECONDS if tenants is None else tenants.rate.seconds_for(self.waiting(model) + 1, now)

    def wait_seconds(self, demand: Demand, now: float) -> float | None:
        """The expected wait of a request that joins now; None = not known yet.

        Two estimates: the rate at which slots are released (while few requests have waited, that is only the arrival
        rate), and the rate at which this queue was served. The shorter wait counts.
        """
        queue = self._queues.get(demand.model)
        if queue is None or queue.served < _ENOUGH_SERVED:
            return None
        places = queue.ahead(demand) + 1
        by_queue = places * (now - queue.began_seconds) / queue.served
        return min(by_queue, queue.tenants.rate.seconds_for(places, now))

    def refuse_late(self, ticket: Ticket, now: float) -> None:
        """Raises DeadlineUnmeetable if the deadline has passed, or the wait is expected to be twice what is left."""
        left = ticket.late_seconds - now
        if left < 0 or (self.wait_seconds(ticket.demand, now) or 0.0) > _DOUBT * left:
            model = ticket.demand.model
            raise DeadlineUnmeetable(
                f"All backends for model {model!r} are busy, and none will have free capacity in time for this"
                " request's deadline.",
                retry_after_seconds=self.retry_after_seconds(model, now),
            )
