"""Requests that may share a batch: short ones and long lists apart, so that the short never wait behind the long."""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from gateway.embeddings.batch import Budget, Gathering, Surroundings
from gateway.embeddings.part import Part
from gateway.embeddings.sizes import ModelSizes


class GroupKey(NamedTuple):
    """What requests must have in common to share a batch."""

    model: str
    template: bytes
    are_ids: bool
    isolation: str
    batch: bool
    suspect: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """A batch under way. `present`: parts whose clients still wait. Without a task, its one client has it sent."""

    group: "BatchGroup"
    gathering: Gathering
    parts: list[Part]
    is_bulk: bool
    present: int = 0
    ended: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def items(self) -> int:
        """Inputs in it."""
        return sum(part.items for part in self.parts)


class BatchGroup:
    """One such group, while any of it is there."""

    def __init__(self, key: GroupKey, sizes: ModelSizes) -> None:
        self.key = key
        self.sizes = sizes
        self.interactive = Gathering()
        self.bulk = Gathering()
        self.look: asyncio.Handle | None = None
        self.timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<BatchGroup {self.key.model} {self.interactive!r} {self.bulk!r}>"

    @property
    def quiet(self) -> bool:
        """Nothing of it is there."""
        return self.interactive.quiet and self.bulk.quiet and self.look is None

    def gathering(self, *, bulk: bool) -> Gathering:
        """Where such requests gather."""
        return self.bulk if bulk else self.interactive

    def looked(self) -> None:
        """It is being looked at: what was to bring that about is of no use any more."""
        self.look = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def surroundings(self, *, crowded: bool) -> Surroundings:
        """What matters for when to send."""
        return Surroundings(self.sizes.slots, self.sizes.overhead_seconds, crowded)

    def makes_wait(self, gathering: Gathering, *, crowded: bool) -> bool:
        """Whether one more request may have to wait for others to end."""
        taken = self.sizes.bulk
        is_behind = gathering is self.bulk and (len(gathering.lane) > 0 or not taken.may_take(1, self.sizes.bulk_share))
        return crowded or is_behind or gathering.in_flight >= self.sizes.slots

    def has_room(self, gathering: Gathering) -> bool:
        """Whether the next batch may be sent: long lists leave some of the backends' slots to short ones."""
        sizes = self.sizes
        return gathering is not self.bulk or sizes.bulk.may_take(gathering.lane.next_items, sizes.bulk_share)

    def take(self, gathering: Gathering, now: float, budget: Budget) -> Flight:
        """The next batch."""
        is_bulk, overhead = gathering is self.bulk, self.sizes.overhead_seconds
        if is_bulk and (left := self.sizes.bulk.left(self.sizes.bulk_share)) is not None:
            budget = Budget(min(budget.items, left), budget.tokens, budget.max_delay_seconds)
        flight = Flight(self, gathering, gathering.take(now, budget, overhead), is_bulk)
        if is_bulk:
            self.sizes.bulk.take(flight.items)
        return flight

    def ended(self, flight: Flight) -> None:
        """A batch is over, however it ended."""
        flight.gathering.ended()
        if flight.is_bulk:
            self.sizes.bulk.give_back(flight.items)

    def look_again_seconds(self, now: float, budget: Budget) -> float | None:
        """When something may be due by time alone; None = never."""
        times = [each.look_again_seconds(now, budget) for each in (self.interactive, self.bulk)]
        return min((at for at in times if at is not None), default=None)
