"""Background tasks that survive exceptions, which are counted and logged; repeated log lines are throttled."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable
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

    def guard(self, task: str) -> "_Guard":
        """`with supervisor.guard(task):` ends the block, and nothing else, when it raises an exception."""
        return _Guard(self, task)

    async def repeat(self, task: str, step: Callable[[], Awaitable[None]], pause_seconds: float) -> None:
        """Run a step repeatedly; pause for `pause_seconds` after an exception."""
        while True:
            try:
                await step()
            except Exception as error:
                self.caught(task, error)
                await asyncio.sleep(pause_seconds)


class _Guard:
    __slots__ = ("_supervisor", "_task")

    def __init__(self, supervisor: Supervisor, task: str) -> None:
        self._supervisor = supervisor
        self._task = task

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: object, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._supervisor.caught(self._task, error)
        return True
