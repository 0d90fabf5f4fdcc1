"""Fair shares of a model's engines: start-time fair queueing by tokens served.

A request starts at the virtual time at which its tenant's last one ends, and ends `tokens / weight` later; the earliest
start comes first. Virtual time is the start of the request that was bound last. Each class has a clock of its own:
batch requests share what interactive ones leave. Finding the next tenants costs as much as the number taken, however
many tenants wait.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from gateway.request import Ask

T = TypeVar("T")


class ServedShare(Protocol):
    """A share: what it was given ends at virtual time `end`."""

    end: float
    weight: float


class FairTurns(Generic[T]):
    """Shares in the order of start-time fair queueing: a share starts where it ends, but lags `most_apart_tokens` by
    weight behind virtual time at most.

    One that lags so far starts at a fixed distance from virtual time: it is kept in a list of its own, by that
    distance. Shares get into it when a look finds them, and leave it when they are moved.
    """

    def __init__(self, most_apart_tokens: float) -> None:
        self._most_apart_tokens = most_apart_tokens
        self._by_end: list[tuple[float, int, ServedShare, T]] = []
        self._lagging: list[tuple[float, int, ServedShare, T]] = []  # by distance, which is below zero
        self._entries: dict[ServedShare, tuple[float, int, ServedShare, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, share: ServedShare) -> bool:
        return share in self._entries

    def join(self, share: ServedShare, number: int, what: T) -> None:
        """A share begins to wait; the number is its own."""
        entry = self._entries[share] = share.end, number, share, what
        insort(self._by_end, entry)

    def leave(self, share: ServedShare) -> None:
        """It does not wait any more."""
        entry = self._entries.pop(share)
        for entries in (self._by_end, self._lagging):
            place = bisect_left(entries, entry)
            if place < len(entries) and entries[place] is entry:
                del entries[place]

    def moved(self, share: ServedShare) -> None:
        """Its end or weight has changed."""
        _, number, _, what = self._entries[share]
        self.leave(share)
        self.join(share, number, what)

    def after(self, now: float) -> Iterator[tuple[float, int, float, T]]:
        """Start, number and weight of each share at virtual time `now`, by start and then number, with what it is.

        Shares must not change until the last is had.
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
_BACKLOG_SECONDS = 1.0  # who waits for longer will not be helped by slots that are kept
_MOST_TENANTS = 1024
_MOST_APART_TOKENS = 65536.0  # what was missed or had in advance counts up to this: nobody pays for long ago
_BYTES_PER_TOKEN = 4
_NEVER = float("-inf")


class Share:
    """A tenant's part in one class. `end`: the virtual time at which what it was given ends."""

    __slots__ = ("end", "weight")

    def __init__(self, weight: float, end: float) -> None:
        self.weight = weight
        self.end = end


class FairClock:
    """Virtual time, in tokens per weight. Knows in which order shares wait: it alone changes them."""

    __slots__ = ("now", "starving", "waiting")

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: FairTurns[Any] = FairTurns(_MOST_APART_TOKENS)
        self.starving: FairTurns[Any] = FairTurns(_MOST_APART_TOKENS)  # of batch requests

    def start(self, share: Share) -> float:
        """When the share's next request starts. One that waited for its own best engine keeps its place."""
        least = self.now - _MOST_APART_TOKENS / share.weight
        return share.end if share.end > least else least

    def wake(self, share: Share) -> None:
        """It begins to wait, or is served at once: no credit is saved up while nothing is wanted."""
        if share.end < self.now:
            share.end = self.now
        else:
            share.end = min(share.end, self.now + _MOST_APART_TOKENS / share.weight)
        self._moved(share)

    def serve(self, share: Share, tokens: float, *, at_once: bool = False) -> None:
        """The share's next request is bound; `at_once`: it had nothing waiting."""
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
        """What it was given took so many tokens more than expected."""
        share.end += more_tokens / share.weight
        self._moved(share)

    def weigh(self, share: Share, weight: float) -> None:
        """What it is given from now on counts by this."""
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
        self.served_tokens = 0.0  # since it is known, of what has ended as reported, of the rest as expected
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
        self.flow_began_seconds = _NEVER  # when somebody last began to wait
        self._by_name: dict[str, Tenant] = {}
        self._last: Tenant | None = None  # to send a request
        self._other_seconds = _NEVER  # when one that is not the last sent one
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

    def of(self, ask: Ask) -> Tenant:
        tenant = self._by_name.get(ask.tenant)
        return self._new(ask) if tenant is None else tenant

    def arrived(self, ask: Ask, now: float) -> Tenant:
        """A request came; gives its tenant."""
        tenant = self.of(ask)
        if tenant.weight != ask.weight:
            self._active_weight += ask.weight - tenant.weight
            tenant.weight = ask.weight
            for clock, share in zip(self.clocks, tenant.shares, strict=True):
                clock.weigh(share, ask.weight)
        last = self._last
        if tenant is not last:
            self._other_seconds = last.seen_seconds if last is not None else _NEVER
            self._last = tenant
            if now - tenant.seen_seconds > _ACTIVE_SECONDS:
                self._active += 1
                self._active_weight += tenant.weight
        tenant.seen_seconds = now
        if not ask.batch:
            self._interactive_seconds = now
        return tenant

    def bound(self, tenant: Tenant, ask: Ask, sequences: int, tokens: float, at_once: bool) -> None:
        """A request is sent to an engine, and expected to take so many tokens."""
        tenant.in_flight += sequences
        self.in_flight += sequences
        tenant.served_tokens += tokens
        self.clocks[ask.batch].serve(tenant.shares[ask.batch], tokens, at_once=at_once)

    def released(self, tenant: Tenant, ask: Ask, sequences: int, more_tokens: float) -> None:
        """It is over, and took so many tokens more than expected."""
        tenant.in_flight -= sequences
        self.in_flight -= sequences
        if more_tokens:
            tenant.served_tokens += more_tokens
            self.clocks[ask.batch].correct(tenant.shares[ask.batch], more_tokens)

    def guards(self, now: float, *, batch: bool) -> bool:
        """Whether some slots are kept from some: from tenants that have much, or from batch requests."""
        return (batch and self._interactive_lately(now)) or self._guards_tenants(now)

    def has_much(self, tenant: Tenant, now: float, *, batch: bool) -> bool:
        """Whether guarded slots are kept from a request of this tenant: they are for others that may come soon.

        Those may have them who have no more than their share of what is in flight, and were not served ahead of others.
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
        """Several were active lately; where all of them have a backlog, there is nobody to keep anything for."""
        if not self._several_lately(now):
            return False
        return self.waiting_tenants < self._active or now - self.flow_began_seconds < _BACKLOG_SECONDS

    def waits_much(self, tenant: Tenant, now: float) -> bool:
        """The same for places in the line."""
        return self._several_lately(now) and tenant.waiting * self._active_weight > tenant.weight * self.waiting

    def _several_lately(self, now: float) -> bool:
        """Whether more than one tenant was active lately; if so, what is known of them all is counted up."""
        if now - self._other_seconds >= _ACTIVE_SECONDS:
            return False
        if now - self._summed_seconds > _SUM_GOOD_FOR_SECONDS:
            self._sum(now)
        return True

    def _sum(self, now: float) -> None:
        """Who was active lately, and their weight."""
        active = [tenant.weight for tenant in self._by_name.values() if now - tenant.seen_seconds < _ACTIVE_SECONDS]
        self._active, self._active_weight = len(active), sum(active)
        self._summed_seconds = now

    def _new(self, ask: Ask) -> Tenant:
        if len(self._by_name) >= self._most_tenants:
            self._forget_some()
        interactive, batch = self.clocks
        shares = Share(ask.weight, interactive.now), Share(ask.weight, batch.now)
        tenant = self._by_name[ask.tenant] = Tenant(ask.tenant, ask.weight, shares)
        return tenant

    def _forget_some(self) -> None:
        """Drop the half that was away for longest, of those that have nothing here."""
        away = [one for one in self._by_name.values() if not (one.in_flight or one.waiting)]
        away.sort(key=attrgetter("seen_seconds"))
        for tenant in away[: len(self._by_name) // 2]:
            del self._by_name[tenant.name]
        self._most_tenants = max(_MOST_TENANTS, 2 * len(self._by_name))  # else each new one would look at all


def expected_tokens(ask: Ask, hit_tokens: int, output_tokens: float) -> float:
    """What a request will take of an engine: prompt that is not cached, and output of all its sequences."""
    prompt = ask.prompt_tokens - hit_tokens if ask.prompt_tokens > 1 else ask.size_bytes // _BYTES_PER_TOKEN
    return max(1, prompt) + output_tokens
