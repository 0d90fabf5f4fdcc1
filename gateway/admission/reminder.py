"""Reminds of one who waits, every so often, for as long as a block runs."""

import asyncio
from collections.abc import Callable
from types import TracebackType


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
