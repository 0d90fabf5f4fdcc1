"""Leases on engines: a request waits in the queue, holds a lease, and releases it. The asyncio side of placement."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Protocol

from gateway.core.errors import DeadlineUnmeetable, GatewayError, NoBackend, WaitExpired, unwrapped
from gateway.core.request import Demand
from gateway.core.routing.policy import EngineVerdict
from gateway.core.scheduling.scheduler import Broker, Lease, Scheduler
from gateway.core.scheduling.wait_queue import Queue, Ticket

_LEAST_TICK_SECONDS = 0.001
_TICK_SECONDS = 0.05  # time alone also opens engines: slow starts grow, unseen prefills end, requests starve


class _KeepAlive:
    """Calls `send` at a fixed interval until it is cancelled."""

    __slots__ = ("_loop", "_seconds", "_send", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, send: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._send = send
        self._timer = loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._send()
        self._timer = self._loop.call_later(self._seconds, self._due)

    def cancel(self) -> None:
        self._timer.cancel()


class KeptLease:
    """A lease that is held beyond the block of its request. A `with` block of its own releases it."""

    __slots__ = ("_release", "lease")

    def __init__(self, lease: Lease, release: Callable[[Lease], None]) -> None:
        self.lease = lease
        self._release = release

    def __enter__(self) -> Lease:
        return self.lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self.lease)


def _keep(lease: Lease) -> None:
    """Release nothing: the `KeptLease` does that later."""


class LowerQueue(Protocol):
    """A queue of lower priority: its tickets are bound to capacity that the queue of the scheduler leaves over."""

    def __len__(self) -> int:
        """The tickets that wait, and the leases that are held; 0 = there is nothing to scan."""

    def scan(self, now: float) -> list[tuple[Ticket, Lease | GatewayError]]:
        """As `Scheduler.scan_queue`, and after it. Revokes leases with capacity that requests of that queue need."""

    def opens_seconds(self, now: float) -> float:
        """When its next ticket may be bound by time alone; infinite = not before something changes."""


class LeaseBroker(Broker):
    """Hands out leases. Owns the waiting clients' futures, including tickets of `lower_queues`."""

    def __init__(
        self,
        scheduler: Scheduler,
        queue: Queue,
        max_wait_seconds: float,
        *,
        clock: Callable[[], float],
        keep_alive_seconds: float = 0.0,
    ) -> None:
        self.apply(max_wait_seconds, keep_alive_seconds)
        self._scheduler = scheduler
        self._queue = queue
        self._lower_queues: list[LowerQueue] = []
        self._clock = clock
        self._changed = asyncio.Event()
        self._waiters: dict[Ticket, asyncio.Future[Lease | GatewayError]] = {}
        self._lapses_seconds = inf  # when parts of engines lapse that are shared with other gateways
        self._lapsed: Callable[[], None] | None = None
        self._on_wait: Callable[[], None] | None = None
        self._on_release: Callable[[int], None] | None = None
        self._wake: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<LeaseBroker {len(self._waiters)} waiting>"

    def add_lower_queue(self, queue: LowerQueue) -> None:
        """Bind tickets of this lower queue to the remaining capacity."""
        self._lower_queues.append(queue)

    def apply(self, max_wait_seconds: float, keep_alive_seconds: float) -> None:
        """Take over other settings, for requests that begin to wait."""
        self.max_wait_seconds = max_wait_seconds
        self._keep_alive_seconds = keep_alive_seconds

    def lapse_at(self, seconds: float, lapsed: Callable[[], None]) -> None:
        """Call `lapsed` before any placement at this time or later, even after a pause of the process."""
        self._lapses_seconds, self._lapsed = seconds, lapsed

    def when_used(self, on_wait: Callable[[], None], on_release: Callable[[int], None]) -> None:
        """Call these when a request begins to wait in the queue; and when one is over while none waits, with its
        engine's number."""
        self._on_wait, self._on_release = on_wait, on_release

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def now(self) -> float:
        return self._clock()

    def retry_after_seconds(self, model: str) -> float:
        return self._queue.retry_after_seconds(model, self._clock())

    def explain(self, demand: Demand, avoid: frozenset[str] = frozenset()) -> list[EngineVerdict]:
        return self._scheduler.explain(demand, self._clock(), avoid)

    async def lease(
        self,
        demand: Demand,
        avoid: frozenset[str] = frozenset(),
        already_waited_seconds: float = 0.0,
        send_keep_alive: Callable[[], None] | None = None,
        holds: bool = True,
    ) -> Lease:
        """A slot on the best engine, after waiting for one if necessary, or for a backend to come back.

        `send_keep_alive` is called every `keep_alive_seconds` of a wait. Without `holds` it waits for no backend to
        come back.
        Raises ModelNotFound, NoBackend, InvalidRequest, QueueFull, WaitExpired or DeadlineUnmeetable. A caller that is
        cancelled while it waits has taken nothing.
        """
        now = self._clock()
        if now >= self._lapses_seconds and self._lapsed is not None:
            self._lapsed()
        placed = self._scheduler.place(demand, now, avoid, holds)
        if isinstance(placed, Ticket):
            if self._on_wait is not None:
                self._on_wait()
            placed = await self.wait(placed, self.max_wait_seconds - already_waited_seconds, send_keep_alive)
        return placed.hand_out(self.first_token, self.release)

    async def change(self, at_most_seconds: float) -> None:
        """Wait until the fleet changes, or for this long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_seconds):
                await self._changed.wait()

    async def wait(
        self, ticket: Ticket, at_most_seconds: float, send_keep_alive: Callable[[], None] | None, *, scans: bool = True
    ) -> Lease:
        """The lease that a scan binds for a ticket. `scans`: there may be capacity for it now.

        Raises WaitExpired, NoBackend or DeadlineUnmeetable, or the error of the scan.
        """
        loop, seconds = asyncio.get_running_loop(), self._keep_alive_seconds
        waiter: asyncio.Future[Lease | GatewayError] = loop.create_future()
        until_late = ticket.late_seconds - self._clock()
        self._waiters[ticket] = waiter
        if scans:
            self.scan_soon()
        # No `asyncio.timeout`: it is not compiled, and dear in a busy queue.
        is_late, limit_seconds = until_late < at_most_seconds, self.max_wait_seconds
        until_expiry = max(0.0, until_late if is_late else at_most_seconds)
        timer = loop.call_later(until_expiry, self._expire, ticket, is_late, limit_seconds)
        keep_alive = _KeepAlive(loop, seconds, send_keep_alive) if seconds > 0 and send_keep_alive is not None else None
        taken = False
        try:
            granted = await waiter
            taken = True
            return unwrapped(granted)
        finally:
            timer.cancel()
            if keep_alive is not None:
                keep_alive.cancel()
            del self._waiters[ticket]
            self._scheduler.leave(ticket)
            if not taken and waiter.done() and not waiter.cancelled() and isinstance(lease := waiter.result(), Lease):
                self.release(lease)  # granted in the same turn as a cancellation

    def _expire(self, ticket: Ticket, is_late: bool, limit_seconds: float) -> None:
        """The wait has reached its limit, or the request's deadline."""
        waiter = self._waiters[ticket]
        if not waiter.done():
            waiter.set_result(self._timeout_error(ticket, limit_seconds, is_late=is_late))

    def _timeout_error(self, ticket: Ticket, limit_seconds: float, *, is_late: bool) -> GatewayError:
        """The error for a request that waited up to the limit; `is_late`: up to its deadline instead."""
        demand, retry_after_seconds = ticket.demand, self.retry_after_seconds(ticket.demand.model)
        if not self._scheduler.is_served(demand, ticket.avoid):
            when = "in time for this request's deadline" if is_late else f"within {limit_seconds:g} s"
            return NoBackend.of(demand.model, when)
        if is_late:
            return DeadlineUnmeetable(
                f"No backend for model {demand.model!r} had free capacity in time for this request's deadline.",
                retry_after_seconds=retry_after_seconds,
            )
        return WaitExpired(
            f"Queue timeout: no backend for model {demand.model!r} had free capacity within {limit_seconds:g} s.",
            retry_after_seconds=retry_after_seconds,
        )

    def first_token(self, lease: Lease) -> None:
        """A prefill is over, so its engine may be open again."""
        self._scheduler.first_token(lease, self._clock())
        if self._waiters:
            self.scan_soon()

    def keep(self, lease: Lease) -> KeptLease:
        """The block that holds this lease will not release it."""
        lease.hand_out(self.first_token, _keep)
        return KeptLease(lease, self.release)

    def release(self, lease: Lease) -> None:
        now = self._clock()
        self._scheduler.release(lease, now, answered=lease.answered, served_tokens=lease.served_tokens)
        if self._waiters:
            self.scan_soon()
        elif self._on_release is not None:
            self._on_release(lease.engine_index)

    def fleet_changed(self) -> None:
        """Read the fleet again, and scan the queue."""
        self._scheduler.refresh()
        self._changed.set()
        self._changed.clear()  # its waiters are woken already
        self.scan_soon()

    def scan_soon(self) -> None:
        """Scan the queue at the end of this turn of the event loop, once for all changes in it."""
        if self._wake is None and (self._waiters or any(self._lower_queues)):
            self._wake = asyncio.get_running_loop().call_soon(self._scan_queue)

    def _scan_queue(self) -> None:
        self._wake = None
        now, tick_seconds = self._clock(), _TICK_SECONDS
        if now >= self._lapses_seconds and self._lapsed is not None:
            self._lapsed()
        for model in self._queue.models():
            for ticket, granted in self._scheduler.scan_queue(model, now):
                self._grant(ticket, granted)
        for queue in self._lower_queues:
            if queue:
                for ticket, granted in queue.scan(now):
                    self._grant(ticket, granted)
                tick_seconds = min(tick_seconds, max(_LEAST_TICK_SECONDS, queue.opens_seconds(now) - now))
        if self._waiters or any(self._lower_queues):
            self._tick_within(tick_seconds)

    def _tick_within(self, seconds: float) -> None:
        """Look again within this many seconds."""
        loop, tick = asyncio.get_running_loop(), self._tick
        if tick is None or tick.when() > loop.time() + seconds:
            if tick is not None:
                tick.cancel()
            self._tick = loop.call_later(seconds, self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self.scan_soon()

    def _grant(self, ticket: Ticket, granted: Lease | GatewayError) -> None:
        waiter = self._waiters.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_result(granted)
        elif isinstance(granted, Lease):
            self._scheduler.release(granted, self._clock())
