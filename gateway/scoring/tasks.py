"""Tasks that are started one after another, and of which none outlives the others' failure.

As `asyncio.TaskGroup`, which in Python 3.11 leaves the task that waits for it half cancelled after a failure.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class Tasks:
    """Tasks, which may start others. Leaving the block waits for all; when one fails, the others are aborted."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._over = asyncio.Event()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run it in a task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.remove(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        if not self._running or self._failure is not None:
            self._over.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._running:
                await self._over.wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
