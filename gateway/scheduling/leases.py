"""The door to the backends: waits in line, hands out leases, and wakes who waits. The asyncio side of placement."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from gateway.errors import DeadlineUnmeetable, GatewayError, NoBackend, WaitExpired
from gateway.request import Ask
from gateway.routing.policy import EngineVerdict
from gateway.scheduling.scheduler import Binding, Placement
from gateway.scheduling.wait_queue import Queue, Ticket

_TICK_SECONDS = 0.05  # time alone opens backends too: slow starts grow, unseen prefills end, waiting requests starve


class Reminder:
    """`with Reminder(seconds, remind):` calls `remind` whenever so many seconds have passed in the block; 0 = never."""

    __slots__ = ("_remind", "_seconds", "_timer")

    def __init__(self, seconds: float, remind: Callable[[], None] | None) -> None:
        self._seconds = seconds
        self._remind = remind
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._seconds > 0 and self._remind is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._due)

    def _due(self) -> None:
        if self._remind is not None:
            self._remind()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._due)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Lease:
    """A place on a backend, held by a `with` block until the last byte."""

    __slots__ = (
        "_binding",
        "_gate",
        "answered",
        "backend",
        "engine_index",
        "first_token_seconds",
        "hit_tokens",
        "rank",
        "served_tokens",
        "waited_seconds",
    )

    def __init__(self, gate: "Gate", binding: Binding) -> None:
        self._gate = gate
        self._binding = binding
        self.backend = binding.engine.name
        self.engine_index = binding.engine.index
        self.rank = binding.engine.rank  # of the engine, where the backend runs several
        self.hit_tokens = binding.hit_tokens  # prompt tokens that the backend is predicted to hold already
        self.waited_seconds = binding.waited_seconds
        self.first_token_seconds: float | None = None  # when it came, by the gate's clock
        self.answered = False  # the whole answer came
        self.served_tokens: int | None = None  # uncached prompt and output, as far as the backend tells

    def first_token(self) -> None:
        """The backend's first token arrived: its prefill is over."""
        self.first_token_seconds = self._gate.first_token(self._binding)

    @property
    def came_tokens(self) -> int:
        """Of a stream, as far as they have been told of: an event is taken for a token."""
        return self._binding.reservation.came_tokens

    def came(self, tokens: int) -> int:
        """So many more tokens of a stream came: more than expected take more of the backend's KV cache.

        Returns how many more may come before this is to be told again.
        """
        binding = self._binding
        return binding.engine.kv.on_tokens(binding.reservation, tokens)

    def counted(self, tokens: int) -> None:
        """The backend says how many tokens the answer had."""
        self._binding.engine.kv.on_usage(self._binding.reservation, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.release(self._binding, answered=self.answered, served_tokens=self.served_tokens)


class Gate:
    """Hands out leases. Owns the waiting clients' futures."""

    def __init__(
        self,
        placement: Placement,
        queue: Queue,
        max_wait_seconds: float,
        clock: Callable[[], float],
        remind_seconds: float = 0.0,
    ) -> None:
        self.max_wait_seconds = max_wait_seconds
        self._remind_seconds = remind_seconds
        self._placement = placement
        self._queue = queue
        self._clock = clock
        self._changed = asyncio.Event()
        self._waiters: dict[Ticket, asyncio.Future[Binding]] = {}
        self._wake: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Gate {len(self._waiters)} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def now(self) -> float:
        """The time by which waits are measured, in seconds."""
        return self._clock()

    def retry_after_seconds(self, model: str) -> float:
        """When a place may come free for one who is not in the model's line."""
        return self._placement.retry_after_seconds(model, self._clock())

    def explain(self, ask: Ask, avoid: frozenset[str] = frozenset()) -> list[EngineVerdict]:
        """What each engine would mean for a request now, best first. Raises ModelNotFound or NoBackend."""
        return self._placement.explain(ask, self._clock(), avoid)

    async def lease(
        self,
        ask: Ask,
        avoid: frozenset[str] = frozenset(),
        already_waited_seconds: float = 0.0,
        remind: Callable[[], None] | None = None,
    ) -> Lease:
        """A place on the best backend, after waiting for it if need be, or for a backend to come back.

        `remind` is called every `remind_seconds` of a wait.
        Raises ModelNotFound, NoBackend, InvalidRequest, QueueFull, WaitExpired or DeadlineUnmeetable. A caller that is
        cancelled while it waits has taken nothing.
        """
        placed = self._placement.place(ask, self._clock(), avoid)
        if isinstance(placed, Binding):
            return Lease(self, placed)
        with Reminder(self._remind_seconds, remind):
            return Lease(self, await self._wait(placed, self.max_wait_seconds - already_waited_seconds))

    async def change(self, at_most_seconds: float) -> None:
        """Wait until the fleet changes, or for this long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_seconds):
                await self._changed.wait()

    async def _wait(self, ticket: Ticket, at_most_seconds: float) -> Binding:
        waiter: asyncio.Future[Binding] = asyncio.get_running_loop().create_future()
        until_late = ticket.late_seconds - self._clock()
        self._waiters[ticket] = waiter
        self.drain_soon()
        taken = False
        try:
            async with asyncio.timeout(max(0.0, min(at_most_seconds, until_late))):
                binding = await waiter
                taken = True
                return binding
        except TimeoutError as error:
            raise self._in_vain(ticket, is_late=until_late < at_most_seconds) from error
        finally:
            del self._waiters[ticket]
            self._queue.leave(ticket)
            if not taken and waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())  # granted in the same turn as the deadline or a cancellation

    def _in_vain(self, ticket: Ticket, *, is_late: bool) -> GatewayError:
        """What one is told who has waited for as long as anybody may, or for so long that no answer is in time."""
        ask, now = ticket.ask, self._clock()
        if not self._placement.table.is_served(ask, ticket.avoid):
            when = "in time for this request's deadline" if is_late else f"within {self.max_wait_seconds:g} s"
            return NoBackend(f"No backend for model {ask.model!r} was ready {when}.")
        if is_late:
            return DeadlineUnmeetable(
                f"No backend for model {ask.model!r} had free capacity in time for this request's deadline.",
                retry_after_seconds=self._placement.retry_after_seconds(ask.model, now),
            )
        return WaitExpired(
            f"Queue timeout: no backend for model {ask.model!r} had free capacity within {self.max_wait_seconds:g} s.",
            retry_after_seconds=self._placement.retry_after_seconds(ask.model, now),
        )

    def first_token(self, binding: Binding) -> float:
        """A prefill is over, so its backend may be open again. Returns when."""
        now = self._clock()
        self._placement.first_token(binding, now)
        if self._waiters:
            self.drain_soon()
        return now

    def release(self, binding: Binding, *, answered: bool = False, served_tokens: int | None = None) -> None:
        """Give back what a request took. Safe to call again."""
        self._placement.release(binding, self._clock(), answered=answered, served_tokens=served_tokens)
        if self._waiters:
            self.drain_soon()

    def fleet_changed(self) -> None:
        """Backends came, went, or changed their limits."""
        self._placement.refresh()
        self._changed.set()
        self._changed.clear()  # whoever waits for it is awake
        self.drain_soon()

    def drain_soon(self) -> None:
        """Look through the line at the end of this turn of the loop, once for all that changes in it."""
        if self._wake is None and self._waiters:
            self._wake = asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        self._wake = None
        now = self._clock()
        for model in self._queue.models():
            for ticket, granted in self._placement.drain(model, now):
                self._grant(ticket, granted)
        if self._waiters and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self.drain_soon()

    def _grant(self, ticket: Ticket, granted: Binding | GatewayError) -> None:
        waiter = self._waiters.get(ticket)
        if waiter is not None and not waiter.done():
            if isinstance(granted, Binding):
                waiter.set_result(granted)
            else:
                waiter.set_exception(granted)
        elif isinstance(granted, Binding):
            self._placement.release(granted, self._clock())
