"""Background tasks that survive exceptions, which are counted and logged; repeated log lines are throttled."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import structlog

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
    """Do this in the background while the block runs; what it raises is for those that await the task."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Supervisor:
    """Counts and logs what background work raises. `guard` and `caught` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.faults: dict[str, int] = {}  # by task
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
