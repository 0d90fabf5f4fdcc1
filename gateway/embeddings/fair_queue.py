"""Pieces of requests that wait to be sent: in order within a tenant, in fair turns between tenants.

Turns are the scheduler's: start-time fair queueing by tokens and weight (`scheduling/fair_share.py`). They are counted
only while several tenants wait, because a single tenant needs none.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from gateway.scheduling.fair_share import FairClock, Share

Owner = TypeVar("Owner")


@dataclass(slots=True, eq=False)
class Piece(Generic[Owner]):
    """Inputs or documents `start` to `start + items` of one request. `alone`: it shares its batch with no other."""

    owner: Owner
    start: int
    items: int
    tokens: int
    size_bytes: int
    joined_seconds: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    alone: bool = False


class _TenantPieces(Generic[Owner]):
    """One tenant's waiting pieces, oldest first, and its share, if it has one."""

    __slots__ = ("pieces", "share")

    def __init__(self) -> None:
        self.pieces: OrderedDict[Piece[Owner], None] = OrderedDict()
        self.share: Share | None = None

    @property
    def first(self) -> Piece[Owner]:
        return next(iter(self.pieces))

    def begin(self, clock: FairClock, number: int) -> None:
        """Its first piece waits for its turn from now on."""
        weight = self.first.weight
        if self.share is None:
            self.share = Share(weight, clock.now)
        elif self.share.weight != weight:
            clock.weigh(self.share, weight)
        clock.wake(self.share)
        clock.waiting.join(self.share, number, self)


_MOST_TENANTS = 1024  # more are kept only while they wait


class FairQueue(Generic[Owner]):
    """Owner of the waiting pieces.

    They are in ordered dicts, because taking from the front of a `dict` leaves gaps: each look at its front takes
    longer.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[Piece[Owner], None] = OrderedDict()  # oldest first
        self._tenants: dict[str, _TenantPieces[Owner]] = {}
        self._clock: FairClock | None = None  # from the second tenant until the queue is empty
        self._numbers = count()
        self._most_tenants = _MOST_TENANTS
        self.items = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"<FairQueue {len(self)} pieces, {self.items} items, {self.tokens} tokens, {len(self._tenants)} tenants>"

    @property
    def oldest_seconds(self) -> float:
        """When the oldest piece joined. Only while there is one."""
        return next(iter(self._pieces)).joined_seconds

    @property
    def next_items(self) -> int:
        """Items of the piece that `take` would begin with; 0 = none waits."""
        return self._next().first.items if self._pieces else 0

    def join(self, piece: Piece[Owner]) -> None:
        self._pieces[piece] = None
        self.items += piece.items
        self.tokens += piece.tokens
        tenant = self._tenants.get(piece.tenant)
        if tenant is None:
            tenant = self._new_tenant(piece.tenant)
        tenant.pieces[piece] = None
        if self._clock is not None and len(tenant.pieces) == 1:
            tenant.begin(self._clock, next(self._numbers))

    def leave(self, piece: Piece[Owner]) -> bool:
        """Remove a piece; False if it does not wait here any more."""
        if piece not in self._pieces:
            return False
        del self._pieces[piece]
        self.items -= piece.items
        self.tokens -= piece.tokens
        tenant = self._tenants[piece.tenant]
        del tenant.pieces[piece]
        if not self._pieces:
            self._tenants, self._clock = {}, None
        elif not tenant.pieces and self._clock is not None and tenant.share is not None:
            self._clock.waiting.leave(tenant.share)  # the share stays: a tenant that comes back is not ahead of others
        return True

    def take(self, max_items: int, max_tokens: int) -> list[Piece[Owner]]:
        """The next batch: at least one piece, and more while they fit."""
        taken: list[Piece[Owner]] = []
        items = tokens = 0
        while self._pieces:
            tenant = self._next()
            piece = tenant.first
            items, tokens = items + piece.items, tokens + piece.tokens
            if taken and (items > max_items or tokens > max_tokens or piece.alone):
                break
            if self._clock is not None and tenant.share is not None:
                self._clock.serve(tenant.share, piece.tokens)
            self.leave(piece)
            taken.append(piece)
            if piece.alone:
                break
        return taken

    def _next(self) -> _TenantPieces[Owner]:
        """The tenant whose turn it is. Only while a piece waits."""
        clock = self._clock
        if clock is None:
            return next(iter(self._tenants.values()))
        return next(clock.waiting.after(clock.now))[3]  # type: ignore[no-any-return]

    def _new_tenant(self, name: str) -> _TenantPieces[Owner]:
        if self._tenants and self._clock is None:
            self._clock = FairClock()
            [only] = self._tenants.values()
            only.begin(self._clock, next(self._numbers))
        if len(self._tenants) >= self._most_tenants:
            self._tenants = {each: tenant for each, tenant in self._tenants.items() if tenant.pieces}
            self._most_tenants = max(_MOST_TENANTS, 2 * len(self._tenants))  # else each new one would look at all
        tenant = self._tenants[name] = _TenantPieces()
        return tenant
