"""A fleet in memory whose idle capacity offline lines may use."""

import asyncio
from dataclasses import dataclass, field, fields
from typing import Any

from gateway.core.request import Demand
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from gateway.features.batches.line_leases import LineLeases
from gateway.features.batches.offline import OfflineQueue
from gateway.features.batches.pace import OfflineLine
from tests.unit.scheduling.builders import Hall, hall
from tests.unit.scheduling.test_leases import MAX_WAIT_SECONDS

DAY_SECONDS = 86400.0


@dataclass
class OfflineHall(Hall):
    """The same, with the queue of offline lines below that of the scheduler."""

    offline: OfflineQueue = field(init=False)

    def __post_init__(self) -> None:
        self.offline = OfflineQueue(scheduler=self.scheduler, queue=self.queue)

    def place(self, demand: Demand) -> Lease | Ticket:
        owner = self.scheduler if demand.offline is None else self.offline
        return owner.place(demand, self.now)

    def leave(self, ticket: Ticket) -> bool:
        return self.scheduler.leave(ticket) or self.offline.leave(ticket)

    def leases(self) -> tuple[LeaseBroker, LineLeases]:
        """A lease broker, and the leases of lines and other requests."""
        clock = asyncio.get_running_loop().time
        broker = LeaseBroker(self.scheduler, self.queue, MAX_WAIT_SECONDS, clock=clock)
        broker.add_lower_queue(self.offline)
        return broker, LineLeases(broker=broker, offline=self.offline)


def offline_hall(*slots: int, **options: Any) -> OfflineHall:
    """As `hall`, with the same options."""
    here = hall(*slots, **options)
    return OfflineHall(**{each.name: getattr(here, each.name) for each in fields(here)})


def a_line(laxity_seconds: float = DAY_SECONDS, *, continues: bool = False) -> OfflineLine:
    """A line of a batch with this laxity, whose holder does not obey by itself."""
    return OfflineLine(DAY_SECONDS, lambda _: laxity_seconds, lambda: None, continues)
