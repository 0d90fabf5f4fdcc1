"""Background work that survives exceptions, which are counted and logged; repeated log lines are throttled."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import structlog

TURN_SECONDS = 0.1  # of the timer that all looks share
_SECONDS = 60.0


class LogThrottle:
    """Allows a log line about each subject once a minute; metrics count the rest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_seconds: dict[Hashable, float] = {}

    def allows(self, subject: Hashable) -> bool:
        """Whether a line may be logged now; if so, it counts as logged."""
        now = self._clock()
        if now - self._logged_seconds.get(subject, -math.inf) < _SECONDS:
            return False
        self._logged_seconds[subject] = now
        return True


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None], name: str | None = None) -> AsyncIterator[asyncio.Task[None]]:
    """Run this in the background while the block runs; its errors go to the callers that await the task."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Look(NamedTuple):
    """A function that is called at a fixed number of turns of the timer."""

    task: str
    look: Callable[[], None]
    turns: int


class Supervisor:
    """Counts and logs errors of background work. `guard` and `caught` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.faults: dict[str, int] = {}  # by task
        self.late_seconds = 0.0  # of the last turn of the timer: the delay of the event loop
        self._looks: list[Look] = []
        self._turn = 0
        self._timer: asyncio.TimerHandle | None = None
        self._throttle = LogThrottle(clock)
        self._log = structlog.get_logger("gateway")

    def caught(self, task: str, error: Exception) -> None:
        """Count an exception; log it, if the same kind was not logged within the last minute."""
        self.faults[task] = self.faults.get(task, 0) + 1
        if self._throttle.allows((task, type(error))):
            self._log.error("background_error", task=task, exc_info=error)

    def on_loop_error(self, context: dict[str, Any]) -> None:
        """The event loop's exception handler, for callbacks and for tasks that were not awaited."""
        error = context.get("exception")
        self.caught("event_loop", error if isinstance(error, Exception) else RuntimeError(context.get("message")))

    @contextmanager
    def guard(self, task: str) -> Iterator[None]:
        """`with supervisor.guard(task):` ends the block, and nothing else, when it raises an exception."""
        try:
            yield
        except Exception as error:
            self.caught(task, error)

    @contextmanager
    def looking(self, task: str, look: Callable[[], None], period_seconds: float = TURN_SECONDS) -> Iterator[None]:
        """Call a function at this period, a multiple of 0.1 s, while the block runs.

        One timer wakes the process for all of them. Those of longer periods take different turns.
        """
        entry = Look(task, look, max(1, round(period_seconds / TURN_SECONDS)))
        self._looks.append(entry)
        if self._timer is None:
            self._wait_for_turn(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._looks.remove(entry)
            if not self._looks and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wait_for_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + TURN_SECONDS
        self._timer = loop.call_at(due, self._take_turn, loop, due)

    def _take_turn(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.late_seconds = max(0.0, loop.time() - due)
        self._wait_for_turn(loop)
        self._turn += 1
        for place, (task, look, turns) in enumerate([*self._looks]):
            if (self._turn + place) % turns == 0:
                with self.guard(task):
                    look()

    @asynccontextmanager
    async def repeating(
        self, task: str, step: Callable[[], Awaitable[None]], pause_seconds: float
    ) -> AsyncIterator[None]:
        """Run a step repeatedly while the block runs; pause for `pause_seconds` after an exception."""

        async def repeat() -> None:
            while True:
                try:
                    await step()
                except Exception as error:
                    self.caught(task, error)
                    await asyncio.sleep(pause_seconds)

        async with running(repeat(), task):
            yield
