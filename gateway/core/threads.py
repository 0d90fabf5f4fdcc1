"""Threads by purpose: a hanging call, such as to a file system, delays only calls of the same purpose.

They are daemons: a call that never returns does not keep the process from ending. Python's own executors are joined
when the process ends, and asyncio's default executor is shared by all, so nothing here uses them.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")
_IDLE_SECONDS: Final = 5.0  # after which a thread without a call ends


class Threads:
    """A limited number of threads for one purpose. Each owner of calls that may hang has its own."""

    def __init__(self, purpose: str, most: int = 1) -> None:
        self._purpose = purpose
        self._most = most
        self._count = self._idle = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<Threads for {self._purpose}: {self._count} of {self._most}, {len(self._calls)} calls wait>"

    async def run(self, do: Callable[Given, Result], *args: Given.args, **options: Given.kwargs) -> Result:
        """Call this in a thread. If the task is cancelled, a waiting call is dropped; a running one ends unattended."""
        waited_for = _ThreadCall(partial(do, *args, **options))
        self._add(waited_for.make)
        await waited_for.done
        return waited_for.outcome()

    async def to_its_end(
        self, do: Callable[..., Result], *args: Any, undo: Callable[[Result], object] | None = None
    ) -> Result:
        """Call this in a thread. If the task is cancelled, the call ends first: others may use the same files next.

        `undo` then releases the call's result, in a thread.
        """
        doing = asyncio.get_running_loop().create_task(self.run(do, *args))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await asyncio.wait([doing])
            if undo is not None and not doing.cancelled() and doing.exception() is None:
                await self.run(undo, doing.result())
            raise
        finally:
            del doing

    def later(self, do: Callable[[], object]) -> None:
        """Call this in a thread, and wait for nothing: such as closing a file that a thread may still read."""
        self._add(partial(_unattended, do))

    def _add(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._calls.append(call)
            if len(self._calls) <= self._idle:
                self._changed.notify()
                return
            if self._count >= self._most:
                return
            self._count += 1
        threading.Thread(target=self._work, name=self._purpose, daemon=True).start()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call  # with its arguments

    def _next(self) -> Callable[[], None] | None:
        """The next call, when there is one; None = the thread ends."""
        with self._changed:
            self._idle += 1
            if not self._calls:
                self._changed.wait(_IDLE_SECONDS)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._count -= 1
            return None


def _unattended(do: Callable[[], object]) -> None:
    with suppress(Exception):
        do()


class _ThreadCall(Generic[Result]):
    """One call, and its outcome. `done` is cancelled with the waiting task."""

    def __init__(self, do: Callable[[], Result]) -> None:
        self._do: Callable[[], Result] | None = do
        self._results: list[Result] = []  # one, or one error
        self._errors: list[BaseException] = []
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()

    def make(self) -> None:
        """Call it, in a thread; the loop may be closed when it returns."""
        do, self._do = self._do, None
        assert do is not None
        if self.done.cancelled():
            return
        try:
            self._results.append(do())
        except BaseException as error:
            self._errors.append(error)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def outcome(self) -> Result:
        """The result. Raises the error and drops it: the traceback has frames that refer to this object."""
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()


_BREATH_SECONDS = 0.001


def breather(
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Callable[[], None]:
    """Releases the interpreter lock every millisecond; otherwise the event loop waits 5 ms at every turn."""
    since = clock()

    def breathe() -> None:
        nonlocal since
        if clock() - since >= _BREATH_SECONDS:
            sleep(_BREATH_SECONDS)
            since = clock()

    return breathe
