"""Fair shares of a model's engines: start-time fair queueing by tokens served.

A request starts at the virtual time at which its tenant's last one ends, and ends `tokens / weight` later; the earliest
start comes first. Virtual time is the start of the request that was bound last. Each class has a clock of its own:
batch requests share what interactive ones leave. Finding the next tenants costs as much as the number taken, however
many tenants wait.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Generic, TypeVar

from gateway.request import Demand

T = TypeVar("T")


class Share:
    """A tenant's part in one class. `end`: the virtual time at which what it was served ends."""

    __slots__ = ("end", "weight")

    def __init__(self, weight: float, end: float) -> None:
        self.weight = weight
        self.end = end


class FairTurns(Generic[T]):
    """Shares in the order of start-time fair queueing. A share's next start is its end, but at most
    `most_apart_tokens` by weight behind virtual time.

    Shares that lag as far as that start at a fixed distance from virtual time: a second list keeps them by that
    distance. `after` moves shares into it; `moved` takes them out.
    """

    def __init__(self, most_apart_tokens: float) -> None:
        self._most_apart_tokens = most_apart_tokens
        self._by_end: list[tuple[float, int, Share, T]] = []
        self._lagging: list[tuple[float, int, Share, T]] = []  # by distance, which is below zero
        self._entries: dict[Share, tuple[float, int, Share, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, share: Share) -> bool:
        return share in self._entries

    def join(self, share: Share, number: int, what: T) -> None:
        """A share begins to wait; `number` is unique and decides between equal starts."""
        entry = self._entries[share] = share.end, number, share, what
        insort(self._by_end, entry)

    def leave(self, share: Share) -> None:
        entry = self._entries.pop(share)
        for entries in (self._by_end, self._lagging):
            place = bisect_left(entries, entry)
            if place < len(entries) and entries[place] is entry:
                del entries[place]

    def moved(self, share: Share) -> None:
        _, number, _, what = self._entries[share]
        self.leave(share)
        self.join(share, number, what)

    def after(self, now: float) -> Iterator[tuple[float, int, float, T]]:
        """Start, number, weight and value of each share at virtual time `now`, by start and then number.

        Shares must not change while this is iterated.
        """
        by_end, lagging = self._by_end, self._lagging
        at = behind = 0
        while True:
            while at < len(by_end) and by_end[at][0] <= now - self._most_apart_tokens / by_end[at][2].weight:
                _, number, share, what = by_end.pop(at)
                entry = self._entries[share] = -self._most_apart_tokens / share.weight, number, share, what
                insort(lagging, entry)
            lags = behind < len(lagging)
            if lags:
                distance, number, share, what = lagging[behind]
                start = now + distance
                if at < len(by_end) and by_end[at][:2] < (start, number):
                    lags = False
            if lags:
                behind += 1
            elif at < len(by_end):
                start, number, share, what = by_end[at]
                at += 1
            else:
                return
            yield start, number, share.weight, what


_ACTIVE_SECONDS = 60.0
_SUM_GOOD_FOR_SECONDS = 1.0
_BACKLOG_SECONDS = 1.0  # after this, tenants that all have a backlog gain nothing from slots kept free
_MOST_TENANTS = 1024
_MOST_APART_TOKENS = 65536.0  # most credit or debt of a share, so that distant history does not count
_BYTES_PER_TOKEN = 4
_NEVER = float("-inf")


class FairClock:
    """Virtual time, in tokens per weight, and the order of waiting shares. All changes of shares go through it."""

    __slots__ = ("now", "starving", "waiting")

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: FairTurns[Any] = FairTurns(_MOST_APART_TOKENS)
        self.starving: FairTurns[Any] = FairTurns(_MOST_APART_TOKENS)  # of batch requests

    def start(self, share: Share) -> float:
        """Virtual start of the share's next request; waiting for a best engine costs no position."""
        least = self.now - _MOST_APART_TOKENS / share.weight
        return share.end if share.end > least else least

    def wake(self, share: Share) -> None:
        """The share begins to wait: idle time earns no credit."""
        if share.end < self.now:
            share.end = self.now
        else:
            share.end = min(share.end, self.now + _MOST_APART_TOKENS / share.weight)
        self._moved(share)

    def serve(self, share: Share, tokens: float, *, at_once: bool = False) -> None:
        """The share's next request is bound; `at_once`: without having waited."""
        now, start = self.now, share.end
        if start > now:
            self.now = start
        elif at_once:
            start = now
        else:
            start = self.start(share)
        share.end = start + tokens / share.weight
        self._moved(share)

    def correct(self, share: Share, more_tokens: float) -> None:
        """A served request took `more_tokens` more than expected."""
        share.end += more_tokens / share.weight
        self._moved(share)

    def weigh(self, share: Share, weight: float) -> None:
        share.weight = weight
        self._moved(share)

    def _moved(self, share: Share) -> None:
        if share in self.waiting:
            self.waiting.moved(share)
            if share in self.starving:
                self.starving.moved(share)


class Tenant:
    """One tenant of one model."""

    __slots__ = ("in_flight", "name", "seen_seconds", "served_tokens", "shares", "waiting", "weight")

    def __init__(self, name: str, weight: float, shares: tuple[Share, Share]) -> None:
        self.name = name
        self.weight = weight
        self.shares = shares  # interactive, batch
        self.in_flight = 0  # sequences
        self.waiting = 0  # requests
        self.served_tokens = 0.0  # as reported for completed requests, as expected for others
        self.seen_seconds = _NEVER

    def __repr__(self) -> str:
        return f"<Tenant {self.name!r} x {self.weight:g}: {self.in_flight} in flight, {self.waiting} waiting>"


class Tenants:
    """The tenants of one model, their clocks, and what they have in flight together."""

    def __init__(self) -> None:
        self.clocks = (FairClock(), FairClock())
        self.in_flight = 0
        self.waiting = 0
        self.waiting_batch = 0
        self.waiting_tenants = 0
        self.flow_began_seconds = _NEVER  # when a tenant without waiting requests last queued one
        self._by_name: dict[str, Tenant] = {}
        self._last: Tenant | None = None  # that sent a request
        self._other_seconds = _NEVER  # when another tenant last sent one
        self._interactive_seconds = _NEVER
        self._active = 0  # tenants, and their weight, when they were last counted
        self._active_weight = 0.0
        self._summed_seconds = _NEVER
        self._most_tenants = _MOST_TENANTS

    def __repr__(self) -> str:
        return f"<Tenants {len(self._by_name)} known, {self.in_flight} in flight, {self.waiting} waiting>"

    def __len__(self) -> int:
        return len(self._by_name)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def of(self, demand: Demand) -> Tenant:
        tenant = self._by_name.get(demand.tenant)
        return self._new(demand) if tenant is None else tenant

    def arrived(self, demand: Demand, now: float) -> Tenant:
        """Note the arrival of a request; returns its tenant."""
        tenant = self.of(demand)
        if tenant.weight != demand.weight:
            self._active_weight += demand.weight - tenant.weight
            tenant.weight = demand.weight
            for clock, share in zip(self.clocks, tenant.shares, strict=True):
                clock.weigh(share, demand.weight)
        last = self._last
        if tenant is not last:
            self._other_seconds = last.seen_seconds if last is not None else _NEVER
            self._last = tenant
            if now - tenant.seen_seconds > _ACTIVE_SECONDS:
                self._active += 1
                self._active_weight += tenant.weight
        tenant.seen_seconds = now
        if not demand.batch:
            self._interactive_seconds = now
        return tenant

    def bound(self, tenant: Tenant, demand: Demand, sequences: int, tokens: float, at_once: bool) -> None:
        """A request is sent to an engine; `tokens` are expected, in prefill and output."""
        tenant.in_flight += sequences
        self.in_flight += sequences
        tenant.served_tokens += tokens
        self.clocks[demand.batch].serve(tenant.shares[demand.batch], tokens, at_once=at_once)

    def released(self, tenant: Tenant, demand: Demand, sequences: int, more_tokens: float) -> None:
        """A request is over; it took `more_tokens` more than expected."""
        tenant.in_flight -= sequences
        self.in_flight -= sequences
        if more_tokens:
            tenant.served_tokens += more_tokens
            self.clocks[demand.batch].correct(tenant.shares[demand.batch], more_tokens)

    def flow_began(self, now: float) -> None:
        """A tenant without waiting requests of a class queues one."""
        self.flow_began_seconds = now

    def queued(self, tenant: Tenant, *, batch: bool) -> None:
        self.waiting_tenants += not tenant.waiting
        tenant.waiting += 1
        self.waiting += 1
        self.waiting_batch += batch

    def dequeued(self, tenant: Tenant, *, batch: bool) -> None:
        tenant.waiting -= 1
        self.waiting_tenants -= not tenant.waiting
        self.waiting -= 1
        self.waiting_batch -= batch

    def guards(self, now: float, *, batch: bool) -> bool:
        """Whether the last slots are kept from any requests: of tenants over their share, or batch requests."""
        return (batch and self._interactive_lately(now)) or self._guards_tenants(now)

    def is_over_share(self, tenant: Tenant, now: float, *, batch: bool) -> bool:
        """Whether the guarded slots are kept from a request of this tenant, for others that may come soon.

        A tenant may use them if it has at most its share of what is in flight and was not served ahead of others.
        """
        if batch and self._interactive_lately(now):
            return True
        if not self._guards_tenants(now):
            return False
        is_ahead = tenant.shares[batch].end > self.clocks[batch].now
        return is_ahead or tenant.in_flight * self._active_weight > tenant.weight * self.in_flight

    def _interactive_lately(self, now: float) -> bool:
        return now - self._interactive_seconds < _ACTIVE_SECONDS

    def _guards_tenants(self, now: float) -> bool:
        """Several tenants were active lately, and not all of them have a backlog: then no other would use the slots."""
        if not self._several_lately(now):
            return False
        return self.waiting_tenants < self._active or now - self.flow_began_seconds < _BACKLOG_SECONDS

    def waits_over_share(self, tenant: Tenant, now: float) -> bool:
        """Whether the tenant has more than its share of the queue."""
        return self._several_lately(now) and tenant.waiting * self._active_weight > tenant.weight * self.waiting

    def _several_lately(self, now: float) -> bool:
        """Whether more than one tenant was active lately; if so, their number and weight are kept up to date."""
        if now - self._other_seconds >= _ACTIVE_SECONDS:
            return False
        if now - self._summed_seconds > _SUM_GOOD_FOR_SECONDS:
            self._sum(now)
        return True

    def _sum(self, now: float) -> None:
        active = [tenant.weight for tenant in self._by_name.values() if now - tenant.seen_seconds < _ACTIVE_SECONDS]
        self._active, self._active_weight = len(active), sum(active)
        self._summed_seconds = now

    def _new(self, demand: Demand) -> Tenant:
        if len(self._by_name) >= self._most_tenants:
            self._forget_some()
        interactive, batch = self.clocks
        shares = Share(demand.weight, interactive.now), Share(demand.weight, batch.now)
        tenant = self._by_name[demand.tenant] = Tenant(demand.tenant, demand.weight, shares)
        return tenant

    def _forget_some(self) -> None:
        """Drop up to half of the tenants: those without requests, the longest inactive first."""
        idle = [one for one in self._by_name.values() if not (one.in_flight or one.waiting)]
        idle.sort(key=attrgetter("seen_seconds"))
        for tenant in idle[: len(self._by_name) // 2]:
            del self._by_name[tenant.name]
        self._most_tenants = max(_MOST_TENANTS, 2 * len(self._by_name))  # else each new tenant would sort all again


def expected_tokens(demand: Demand, hit_tokens: int, output_tokens: float) -> float:
    """Tokens that a request costs an engine: uncached prompt, and output of all its sequences."""
    prompt = demand.prompt_tokens - hit_tokens if demand.prompt_tokens > 1 else demand.size_bytes // _BYTES_PER_TOKEN
    return max(1, prompt) + output_tokens
