"""The waiting requests of each model in fair order, the limit of the backlog, and wait estimates.

Fair order: over tenants by tokens served, within a tenant by least prefill, aged. Interactive requests come before
batch requests. Requests of both classes that starve come first, for an eighth as many tokens as others.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from math import ceil, inf
from typing import Final

from gateway.core.errors import DeadlineUnmeetable, QueueFull
from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.scheduling.fair_share import UNKNOWN_SECONDS, Backlog, FairClock, Tenant, Tenants, TenantsOfModels


class Ticket:
    """One waiting request."""

    __slots__ = (
        "arrived_seconds", "avoid", "demand", "goes_anywhere", "holds", "late_seconds", "number", "prefill_seconds",
        "tokens", "turn", "waits_among", "waits_for", "waits_seconds", "waits_until",
    )  # fmt: skip

    def __init__(
        self,
        demand: Demand,
        arrived_seconds: float,
        avoid: frozenset[str],
        prefill_seconds: float,
        turn: float,
        tokens: float,
        holds: bool = True,
    ) -> None:
        self.demand = demand
        self.holds = holds  # it also waits for a backend to come back
        self.arrived_seconds = arrived_seconds
        self.avoid = avoid
        self.goes_anywhere = not avoid and demand.pinned is None and demand.rank is None and demand.sequences == 1
        # When even the least prefill would end after its deadline.
        self.late_seconds = inf if demand.deadline_seconds is None else demand.deadline_seconds - prefill_seconds
        self.prefill_seconds = prefill_seconds  # the least of its engines
        self.turn = turn  # the least comes first within a tenant
        self.number = 0  # in the order of arrival, which decides between equal turns
        self.tokens = tokens  # charged to its tenant's share
        self.waits_for = 0  # position of its best engine in `waits_among`, `waits_until` that time
        self.waits_among: Sequence[Engine] = ()
        self.waits_seconds = self.waits_until = 0.0  # the former: of its prefill there

    def take_turn(self, turn: float) -> None:
        """Wait for another turn; its tenant queue must be sorted again."""
        self.turn = turn

    def enter(self, demand: Demand, now: float, turn: float) -> None:
        """Begin to wait in the queue after a wait for idle capacity: in another class, as a request arriving now."""
        self.demand, self.arrived_seconds, self.turn = demand, now, turn

    def may_use(self, engine: Engine) -> bool:
        """Whether it may go to this engine; an engine that failed it is only a last resort."""
        demand = self.demand
        if demand.pinned is not None:
            return demand.pinned == engine.name
        return engine.name not in self.avoid and demand.rank in (None, engine.rank)

    def choose(self, at: int, prefill_seconds: float, among: Sequence[Engine], until: float) -> None:
        """Remember its best engine, by its position among these."""
        self.waits_for, self.waits_seconds, self.waits_among, self.waits_until = at, prefill_seconds, among, until


_FURTHER_SECONDS: Final = 0.05  # between two longer scans
_FURTHER: Final = 4  # how much longer they are
_STARVED_SHARE: Final = 0.125  # of the tokens served to the others


class TenantQueue:
    """The waiting requests of one tenant and class: in the order of their turns, and oldest first."""

    __slots__ = ("batch", "by_turn", "number", "tenant", "tickets")

    def __init__(self, tenant: Tenant, number: int, *, batch: bool) -> None:
        self.tenant = tenant
        self.number = number  # in the order in which the model's tenant queues began to wait
        self.batch = batch
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.by_turn: list[tuple[float, int, Ticket]] = []

    @property
    def since_seconds(self) -> float:
        return next(iter(self.tickets)).arrived_seconds

    def join(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        insort(self.by_turn, (ticket.turn, ticket.number, ticket))

    def leave(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        del self.by_turn[bisect_left(self.by_turn, (ticket.turn, ticket.number))]

    def reorder(self, turn_of: Callable[[Ticket], float]) -> None:
        for ticket in self.tickets:
            ticket.take_turn(turn_of(ticket))
        self.by_turn = sorted([(ticket.turn, ticket.number, ticket) for ticket in self.tickets])

    def ahead(self, turn: float) -> int:
        """The number of requests before this turn."""
        return bisect_left(self.by_turn, (turn,))


class _Contender:
    """A tenant queue with the virtual start of its next request."""

    __slots__ = ("_by_turn", "_number", "_start", "_taken", "_weight")

    def __init__(self, start: float, weight: float, flow: TenantQueue) -> None:
        self._start = start
        self._weight = weight
        self._number = flow.number  # decides between equal starts
        self._by_turn = flow.by_turn
        self._taken = 0

    def is_before(self, other: "_Contender") -> bool:
        return self._start < other._start or (self._start == other._start and self._number < other._number)

    def take(self) -> Ticket:
        """Take its next request, as when it is bound."""
        ticket = self._by_turn[self._taken][2]
        self._taken += 1
        self._start += ticket.tokens / self._weight
        return ticket

    def has_more(self) -> bool:
        """Whether `take` may be called again."""
        return self._taken < len(self._by_turn)


class ModelQueue:
    """The waiting requests of one model, in a queue for each tenant and class."""

    def __init__(self, tenants: Tenants, began_seconds: float) -> None:
        self.tenants = tenants
        self.began_seconds = began_seconds
        self.served = 0  # since then
        self.restricted = 0  # requests that may not use every engine
        self.unheld = 0  # requests that fail as soon as no backend serves the model
        self._flows: dict[tuple[str, bool], TenantQueue] = {}
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()  # oldest first
        self._starved_tokens = 0.0  # that starving requests were served beyond their share
        self._starved_seconds = -inf  # when the last one was served
        self._numbers = count()
        self._further = 0  # start of the next longer scan
        self._further_seconds = -inf  # time of the last one

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    @property
    def flows(self) -> Iterable[TenantQueue]:
        return self._flows.values()

    def join(self, ticket: Ticket) -> None:
        demand = ticket.demand
        ticket.number = next(self._numbers)
        flow = self._flows.get((demand.tenant, demand.batch))
        if flow is None:
            tenant = self.tenants.of(demand)
            flow = self._flows[demand.tenant, demand.batch] = TenantQueue(tenant, ticket.number, batch=demand.batch)
            clock, share = self.tenants.clocks[demand.batch], tenant.shares[demand.batch]
            clock.wake(share)
            clock.waiting.join(share, flow.number, flow)
            self.tenants.flow_began(ticket.arrived_seconds)
        flow.join(ticket)
        self._tickets[ticket] = None
        self.restricted += not ticket.goes_anywhere
        self.unheld += not ticket.holds
        self.tenants.queued(flow.tenant, batch=demand.batch)

    def leave(self, ticket: Ticket) -> bool:
        """Remove a ticket; False if it was removed before."""
        if ticket not in self._tickets:
            return False
        demand = ticket.demand
        flow = self._flows[demand.tenant, demand.batch]
        del self._tickets[ticket]
        flow.leave(ticket)
        self.restricted -= not ticket.goes_anywhere
        self.unheld -= not ticket.holds
        if not flow.tickets:
            del self._flows[demand.tenant, demand.batch]
            self.tenants.clocks[demand.batch].waiting.leave(flow.tenant.shares[demand.batch])
        self.tenants.dequeued(flow.tenant, batch=demand.batch)
        return True

    def in_order(self, end: int, start: int = 0) -> list[Ticket]:
        """The tickets from one position to another, in the order of service."""
        if len(self._flows) == 1:
            [flow] = self._flows.values()
            return [ticket for _, _, ticket in flow.by_turn[start:end]]
        interactive, batch = self.tenants.clocks
        tickets = merged(_contenders(interactive), end)
        if len(tickets) < end:
            tickets += merged(_contenders(batch), end - len(tickets))
        return tickets[start:]

    def starving(self, since_seconds: float) -> Iterator[Ticket]:
        """Requests that arrived before this time, in the order of service; none while such requests have had more than
        their share since then. They are of the longest waiting class, by tenant in fair order.
        """
        oldest = next(iter(self._tickets), None)
        if oldest is None or oldest.arrived_seconds >= since_seconds:
            return
        if self._starved_tokens > 0 and self._starved_seconds >= since_seconds:
            return
        clock = self.tenants.clocks[oldest.demand.batch]
        flow: TenantQueue
        for _, _, _, flow in clock.waiting.after(clock.now):
            for ticket in flow.tickets:
                if ticket.arrived_seconds >= since_seconds:
                    break
                yield ticket

    def further(self, scan: int, now: float) -> tuple[int, int] | None:
        """The next part of the queue to scan when the first part leaves an engine idle, from where to where; None = too
        soon. Successive calls cover the whole queue; the cost of each scan is bounded.
        """
        if now - self._further_seconds < _FURTHER_SECONDS:
            return None
        start = self._further if self._further < len(self) else 0
        self._further, self._further_seconds = start + _FURTHER * scan, now
        return start, self._further

    def serve(self, ticket: Ticket, now: float, *, starving: bool) -> None:
        """A request goes to an engine; `starving`: because it has waited for long."""
        self.served += 1
        if starving:
            self._starved_tokens, self._starved_seconds = ticket.tokens, now
        else:
            self._starved_tokens = max(0.0, self._starved_tokens - _STARVED_SHARE * ticket.tokens)

    def ahead(self, demand: Demand, turn: float = inf) -> int:
        """About how many requests will be served before a new one, if all take as many tokens."""
        own = self._flows.get((demand.tenant, demand.batch))
        count = 0 if own is None else own.ahead(turn)
        places = count + 1
        for flow in self._flows.values():
            if flow.batch < demand.batch:
                count += len(flow.tickets)
            elif flow.batch == demand.batch and flow is not own:
                count += min(len(flow.tickets), ceil(places * flow.tenant.weight / demand.weight))
        return count


def merged(contenders: Iterator[_Contender], count: int) -> list[Ticket]:
    """The first `count` tickets by virtual start, in the order of binding.

    `contenders` are sorted by start; only those with a ticket in the result are read.
    """
    found: list[Ticket] = []
    again: list[_Contender] = []  # the next one last
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
    """Insert it into the sorted list, the next one last."""
    low, high = 0, len(among)
    while low < high:
        middle = (low + high) // 2
        if contender.is_before(among[middle]):
            low = middle + 1
        else:
            high = middle
    among.insert(low, contender)


def _contenders(clock: FairClock) -> Iterator[_Contender]:
    """All tenant queues of a class by virtual start."""
    for start, _, weight, flow in clock.waiting.after(clock.now):
        yield _Contender(start, weight, flow)


_ENOUGH_SERVED: Final = 16  # requests that waited in this queue: with fewer its rate is unknown
_DOUBT: Final = 2.0  # an expected wait refuses a request only if it is this many times too long


class Queue:
    """Owner of all waiting requests. Requests that wait elsewhere count in its `backlog`,
    too. Waits are expected from a model's queue, and from the rate at which its requests release their slots."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.backlog = Backlog(max_requests, max_bytes)
        self.requests = 0
        self.size_bytes = 0
        self._queues: dict[str, ModelQueue] = {}
        self.tenants = TenantsOfModels()

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Ticket]:
        for queue in self._queues.values():
            yield from queue

    def __repr__(self) -> str:
        models = ", ".join(f"{model} {len(queue)}" for model, queue in self._queues.items())
        return f"<Queue {self.requests} waiting, {self.size_bytes} bytes: {models or 'empty'}>"

    def reorder(self, turn_of: Callable[[Ticket], float]) -> None:
        """Give all that wait the turns that they would have had under other settings."""
        for queue in self._queues.values():
            for flow in queue.flows:
                flow.reorder(turn_of)

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
            queue = self._queues[demand.model] = ModelQueue(self.tenants.of(demand.model), ticket.arrived_seconds)
        queue.join(ticket)
        self.requests += 1
        self.size_bytes += demand.size_bytes
        self.backlog.join(demand.size_bytes)

    def refuse_if_full(self, demand: Demand, now: float) -> None:
        """Raises QueueFull when the limit of waiting requests or bytes is reached.

        A tenant over its share of the queue may not take the last places while others were active lately.
        """
        tenants = self.tenants.of(demand.model)
        if self.backlog.is_full_for(demand.size_bytes, guarded=tenants.waits_over_share(tenants.of(demand), now)):
            raise QueueFull(
                f"The queue is full: all backends for model {demand.model!r} are busy and {self.backlog.requests}"
                " requests are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=self.retry_after_seconds(demand.model, now),
            )

    def serve(self, ticket: Ticket, now: float, *, starving: bool = False) -> None:
        queue = self._queues.get(ticket.demand.model)
        if queue is not None:
            queue.serve(ticket, now, starving=starving)
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
        tenants = self.tenants.known(model)
        return UNKNOWN_SECONDS if tenants is None else tenants.rate.seconds_for(self.waiting(model) + 1, now)

    def wait_seconds(self, demand: Demand, now: float, turn: float = inf) -> float | None:
        """The expected wait of a request that joins now with this turn; None = not known yet.

        Two estimates: the rate at which slots are released (while few requests have waited, that is only the arrival
        rate), and the rate at which this queue was served. The shorter wait counts.
        """
        queue = self._queues.get(demand.model)
        if queue is None or queue.served < _ENOUGH_SERVED:
            return None
        places = queue.ahead(demand, turn) + 1
        by_queue = places * (now - queue.began_seconds) / queue.served
        return min(by_queue, queue.tenants.rate.seconds_for(places, now))

    def refuse_late(self, ticket: Ticket, now: float) -> None:
        """Raises DeadlineUnmeetable if the deadline has passed, or the expected wait is twice the remaining time."""
        left = ticket.late_seconds - now
        if left < 0 or (self.wait_seconds(ticket.demand, now, ticket.turn) or 0.0) > _DOUBT * left:
            model = ticket.demand.model
            raise DeadlineUnmeetable(
                f"All backends for model {model!r} are busy, and none will have free capacity in time for this"
                " request's deadline.",
                retry_after_seconds=self.retry_after_seconds(model, now),
            )
