"""Leases of offline lines: they wait in their own queue, until their batch expires."""

from collections.abc import Callable

from gateway.core.request import Demand
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.scheduling.scheduler import Lease, LeaseSource
from gateway.features.batches.offline import OfflineQueue
from gateway.features.batches.pace import OfflineLine


class LineLeases(LeaseSource):
    """Leases for the dispatcher of offline lines, and of requests that are batched like them, which get usual ones."""

    def __init__(self, *, broker: LeaseBroker, offline: OfflineQueue) -> None:
        self._broker = broker
        self._offline = offline

    async def lease(
        self,
        demand: Demand,
        avoid: frozenset[str] = frozenset(),
        already_waited_seconds: float = 0.0,
        send_keep_alive: Callable[[], None] | None = None,
        holds: bool = True,
    ) -> Lease:
        broker, offline, line = self._broker, self._offline, demand.offline
        if not isinstance(line, OfflineLine):
            return await broker.lease(demand, avoid, already_waited_seconds, send_keep_alive, holds)
        now = broker.now()
        ticket = offline.place(demand, now, avoid)
        scans = not offline.is_behind_others(ticket)  # the others have looked for idle capacity in vain
        try:
            lease = await broker.wait(ticket, line.expires_seconds - now, send_keep_alive, scans=scans)
        finally:
            offline.leave(ticket)
        return lease.hand_out(broker.first_token, broker.release)
