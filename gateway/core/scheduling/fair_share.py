"""The number of waiting requests, their service rate, and fair shares of a model's engines.

Shares are by start-time fair queueing of the tokens served.

A request starts at the virtual time at which its tenant's last one ends, and ends `tokens / weight` later; the earliest
start comes first. Virtual time is the start of the request that was bound last. Each class has its own clock: batch
requests share the capacity left by interactive ones. Finding the next tenants costs as much as the number taken,
however many tenants wait.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import exp
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from gateway.core.request import Demand

_GUARDED_SHARE: Final = 16  # one place in 16 is kept from tenants over their share and from requests of unknown tenant


class Backlog:
    """The one count of requests and bytes that wait."""

    __slots__ = ("_max_bytes", "_max_requests", "requests", "size_bytes")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.requests = 0
        self.size_bytes = 0

    def apply(self, max_requests: int, max_bytes: int) -> None:
        """Take over other limits. Requests waiting beyond them continue to wait."""
        self._max_requests, self._max_bytes = max_requests, max_bytes

    def __repr__(self) -> str:
        return f"<Backlog {self.requests} requests, {self.size_bytes} bytes>"

    def is_full_for(self, size_bytes: int, *, guarded: bool) -> bool:
        """Whether one more request of this size would be too much. `guarded`: it may not take the last places."""
        most, most_bytes = self._max_requests, self._max_bytes
        if guarded:
            most, most_bytes = most - most // _GUARDED_SHARE, most_bytes - most_bytes // _GUARDED_SHARE
        return self.requests >= most or self.size_bytes + size_bytes > most_bytes

    def join(self, size_bytes: int) -> None:
        self.requests += 1
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        self.requests -= 1
        self.size_bytes -= size_bytes


_MEMORY_SECONDS: Final = 10.0
UNKNOWN_SECONDS: Final = 1.0  # answers take seconds, so a retry after a tenth is too early


class ServiceRate:
    """Mean time between two completed requests of one model, over the last ten seconds or so: they come in bursts."""

    __slots__ = ("_count", "_last", "_seconds")

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = 0.0  # both fade with time
        self._count = 0.0

    def left(self, now: float) -> None:
        if self._last is not None:
            gap = now - self._last
            fading = exp(-gap / _MEMORY_SECONDS)
            self._seconds = self._seconds * fading + gap
            self._count = self._count * fading + 1
        self._last = now

    def seconds_for(self, places: int, now: float) -> float:
        """Expected time until this many slots are released, between 0.1 and 60 seconds."""
        between = self.between_seconds(now)
        return UNKNOWN_SECONDS if between is None else min(60.0, max(0.1, places * between))

    def between_seconds(self, now: float) -> float | None:
        """The mean; None = not known yet."""
        if self._last is None or self._seconds == 0.0:
            return None
        silence = now - self._last
        fading = exp(-silence / _MEMORY_SECONDS)
        if_now = (self._seconds * fading + silence) / (self._count * fading + 1)  # if another left at this moment
        return max(self._seconds / self._count, if_now)


T = TypeVar("T")


class Share:
    """A tenant's part in one class. `end`: the virtual time at the end of its served tokens."""

    __slots__ = ("end", "weight")

    def __init__(self, weight: float, end: float) -> None:
        self.weight = weight
        self.end = end


class FairTurns(Generic[T]):
    """Shares in the order of start-time fair queueing. A share's next start is its end, but at most
    `most_apart_tokens` by weight behind virtual time.

    Shares with that lag start at a fixed distance from virtual time: a second list keeps them by distance. `after`
    moves shares into it; `moved` takes them out.
    """

    def __init__(self, most_apart_tokens: float) -> None:
        self._most_apart_tokens = most_apart_tokens
        self._by_end: list[tuple[float, int, Share, T]] = []
        self._lagging: list[tuple[float, int, Share, T]] = []  # by distance, which is below zero
        self.entries: dict[Share, tuple[float, int, Share, T]] = {}

    def join(self, share: Share, number: int, what: T) -> None:
        """A share begins to wait; `number` is unique and decides between equal starts."""
        entry = self.entries[share] = share.end, number, share, what
        insort(self._by_end, entry)

    def leave(self, share: Share) -> None:
        entry = self.entries.pop(share)
        for entries in (self._by_end, self._lagging):
            place = bisect_left(entries, entry)
            if place < len(entries) and entries[place][2] is share:
                del entries[place]

    def moved(self, share: Share) -> None:
        _, number, _, what = self.entries[share]
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
                entry = self.entries[share] = -self._most_apart_tokens / share.weight, number, share, what
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


_ACTIVE_SECONDS: Final = 60.0
_SUM_GOOD_FOR_SECONDS: Final = 1.0
_BACKLOG_SECONDS: Final = 1.0  # after this, tenants that all have a backlog gain nothing from slots kept free
_MOST_TENANTS: Final = 1024
_MOST_MODELS: Final = 1024  # idle ones beyond are forgotten
_MOST_APART_TOKENS: Final = 65536.0  # most credit or debt of a share, so that distant history does not count
_BYTES_PER_TOKEN: Final = 4
_NEVER = float("-inf")


class FairClock:
    """Virtual time, in tokens per weight, and the order of waiting shares. All changes of shares go through it."""

    __slots__ = ("now", "waiting")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.waiting: FairTurns[Any] = FairTurns(_MOST_APART_TOKENS)

    def start(self, share: Share) -> float:
        """Virtual start of the share's next request; waiting for a best engine costs no position."""
        least = self.now - _MOST_APART_TOKENS / share.weight
        return share.end if share.end > least else least

    def wake(self, share: Share) -> None:
        """The share begins to wait: idle time earns no credit."""
        share.end = max(self.now, min(share.end, self.now + _MOST_APART_TOKENS / share.weight))
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
        if share in self.waiting.entries:
            self.waiting.moved(share)

    def correct(self, share: Share, more_tokens: float) -> None:
        share.end += more_tokens / share.weight
        if share in self.waiting.entries:
            self.waiting.moved(share)

    def weigh(self, share: Share, weight: float) -> None:
        share.weight = weight
        self._moved(share)

    def _moved(self, share: Share) -> None:
        if share in self.waiting.entries:
            self.waiting.moved(share)


class Tenant:
    """One tenant of one model."""

    __slots__ = ("in_flight", "name", "seen_seconds", "served_tokens", "shares", "waiting", "weight")

    def __init__(self, name: str, weight: float, shares: list[Share], *, served_tokens: float = 0.0) -> None:
        self.name = name
        self.weight = weight
        self.shares = shares  # interactive, batch
        self.in_flight = 0  # sequences
        self.waiting = 0  # requests
        self.served_tokens = served_tokens  # as reported for completed requests, as expected for others
        self.seen_seconds = _NEVER

    def __repr__(self) -> str:
        return f"<Tenant {self.name!r} x {self.weight:g}: {self.in_flight} in flight, {self.waiting} waiting>"


class Tenants:
    """The tenants of one model, their clocks, and their requests in flight."""

    def __init__(self) -> None:
        self.clocks = [FairClock(), FairClock()]  # interactive, batch; a list is indexed faster
        self.in_flight = 0
        self.waiting = 0
        self.waiting_batch = 0
        self.waiting_tenants = 0
        self.rate = ServiceRate()  # at which their requests release slots
        self._flow_began_seconds = _NEVER  # when a tenant without waiting requests last queued one
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

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def of(self, demand: Demand) -> Tenant:
        return self._by_name.get(demand.tenant) or self._new(demand)

    def arrived(self, demand: Demand, now: float) -> Tenant:
        tenant = self._by_name.get(demand.tenant) or self._new(demand)
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

    def served(self) -> dict[str, Any]:
        """The tenants' served tokens, the input of `restore`."""
        tenants = [
            (each.name, each.weight, *[share.end for share in each.shares], each.served_tokens)
            for each in self._by_name.values()
        ]
        return {"now": [clock.now for clock in self.clocks], "tenants": tenants}

    def restore(self, served: dict[str, Any]) -> None:
        """Continue from the tokens that another process served. Call it before the first request."""
        self.clocks = [FairClock(now) for now in served["now"]]
        for name, weight, interactive, batch, served_tokens in served["tenants"]:
            shares = [Share(weight, interactive), Share(weight, batch)]
            self._by_name[name] = Tenant(name, weight, shares, served_tokens=served_tokens)

    def flow_began(self, now: float) -> None:
        """A tenant without waiting requests queues one."""
        self._flow_began_seconds = now

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
        return (batch and now - self._interactive_seconds < _ACTIVE_SECONDS) or self._guards_tenants(now)

    def is_over_share(self, tenant: Tenant, now: float, *, batch: bool) -> bool:
        """Whether the guarded slots are kept from a request of this tenant, for others that may come soon.

        A tenant may use them if it has at most its share of what is in flight and was not served ahead of others.
        """
        if batch and now - self._interactive_seconds < _ACTIVE_SECONDS:
            return True
        if now - self._other_seconds >= _ACTIVE_SECONDS or not self._guards_tenants(now):
            return False
        is_ahead = tenant.shares[batch].end > self.clocks[batch].now
        return is_ahead or tenant.in_flight * self._active_weight > tenant.weight * self.in_flight

    def _guards_tenants(self, now: float) -> bool:
        """Several tenants were active lately, and not all of them have a backlog: then no other would use the slots."""
        if not self._several_lately(now):
            return False
        return self.waiting_tenants < self._active or now - self._flow_began_seconds < _BACKLOG_SECONDS

    def waits_over_share(self, tenant: Tenant, now: float) -> bool:
        """Whether the tenant has more than its share of the queue."""
        return self._several_lately(now) and tenant.waiting * self._active_weight > tenant.weight * self.waiting

    def _several_lately(self, now: float) -> bool:
        """Whether more than one tenant was active lately; if so, their number and weight are kept up to date."""
        if now - self._other_seconds >= _ACTIVE_SECONDS:
            return False
        if now - self._summed_seconds > _SUM_GOOD_FOR_SECONDS:
            weights = [one.weight for one in self._by_name.values() if now - one.seen_seconds < _ACTIVE_SECONDS]
            self._active, self._active_weight = len(weights), sum(weights, 0.0)
            self._summed_seconds = now
        return True

    def _new(self, demand: Demand) -> Tenant:
        if len(self._by_name) >= self._most_tenants:
            self._forget_some()
        interactive, batch = self.clocks
        shares = [Share(demand.weight, interactive.now), Share(demand.weight, batch.now)]
        tenant = self._by_name[demand.tenant] = Tenant(demand.tenant, demand.weight, shares)
        return tenant

    def _forget_some(self) -> None:
        """Drop up to half of the tenants: those without requests, the longest inactive first."""
        idle = [one for one in self._by_name.values() if not (one.in_flight or one.waiting)]
        idle.sort(key=attrgetter("seen_seconds"))
        for tenant in idle[: len(self._by_name) // 2]:
            del self._by_name[tenant.name]
        self._most_tenants = max(_MOST_TENANTS, 2 * len(self._by_name))  # else each new tenant would sort all again


class TenantsOfModels:
    """Owner of the tenants of each model that has had requests."""

    def __init__(self) -> None:
        self._by_model: dict[str, Tenants] = {}

    def of(self, model: str) -> Tenants:
        tenants = self._by_model.get(model)
        if tenants is None:
            if len(self._by_model) >= _MOST_MODELS:  # clients name models that do not exist, too
                self._by_model = {name: each for name, each in self.items() if each.waiting or each.in_flight}
            tenants = self._by_model[model] = Tenants()
        return tenants

    def known(self, model: str) -> Tenants | None:
        return self._by_model.get(model)

    def items(self) -> list[tuple[str, Tenants]]:
        return list(self._by_model.items())


def expected_tokens(demand: Demand, hit_tokens: int, output_tokens: float) -> float:
    """Tokens that a request costs an engine: uncached prompt, and output of all its sequences."""
    prompt = demand.prompt_tokens - hit_tokens if demand.prompt_tokens > 1 else demand.size_bytes // _BYTES_PER_TOKEN
    return max(1, prompt) + output_tokens
