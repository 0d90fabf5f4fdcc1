"""Background work that outlives its faults: an exception is counted and logged, and the work goes on.

Log lines about the same thing are throttled.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable
from types import TracebackType
from typing import Any

import structlog

_SECONDS = 60.0


class LogThrottle:
    """Tells of each thing once a minute at most; metrics tell the rest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told_seconds: dict[Hashable, float] = {}

    def tells(self, thing: Hashable) -> bool:
        """Whether it is time to tell of it; if so, it counts as told."""
        now = self._clock()
        if now - self._told_seconds.get(thing, -math.inf) < _SECONDS:
            return False
        self._told_seconds[thing] = now
        return True


class Supervisor:
    """Counts and logs what background work raises. `guard` and `caught` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.faults: dict[str, int] = {}  # by task
        self._quiet = LogThrottle(clock)
        self._log = structlog.get_logger("gateway")

    def caught(self, task: str, error: Exception) -> None:
        """Count an exception; log it, if the same kind was not logged within the last minute."""
        self.faults[task] = self.faults.get(task, 0) + 1
        if self._quiet.tells((task, type(error))):
            self._log.error("background_error", task=task, exc_info=error)

    def complained(self, context: dict[str, Any]) -> None:
        """What the event loop calls for exceptions of callbacks, and of tasks that nothing awaited."""
        error = context.get("exception")
        self.caught("event_loop", error if isinstance(error, Exception) else RuntimeError(context.get("message")))

    def guard(self, task: str) -> "_Guard":
        """`with supervisor.guard(task):` ends the block, and nothing else, when it raises an exception."""
        return _Guard(self, task)

    async def repeat(self, task: str, step: Callable[[], Awaitable[None]], pause_seconds: float) -> None:
        """Run a step for ever; rest for `pause_seconds` after each one that raised."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._supervisor.caught(self._task, error)
        return True
