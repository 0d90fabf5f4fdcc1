"""The dashboard's stream: made once a second for all watchers together, and not at all while there is none.

A message may take at most a hundredth of the time: after a slow one, the next one comes later. A watcher that does not
read in time is disconnected, which frees its place; its page reconnects, and begins with a full snapshot. If all places
are taken, a newcomer replaces the oldest connection.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import orjson

from gateway.core.errors import Draining, RateLimited
from gateway.core.supervisor import Supervisor

MOST_WATCHERS: Final = 16
_PERIOD_SECONDS = 1.0
_TIMES_AS_LONG: Final = 100  # the pause, than a look took
_MOST_UNREAD: Final = 8  # messages
_KEPT_SECONDS: Final = 30.0  # a place, for certain


class Shown(Protocol):
    """The interface of `LiveView`."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def full(self) -> dict[str, Any]: ...
    def tick(self) -> dict[str, Any]: ...


Messages = asyncio.Queue[bytes | None]
"""The next message for a watcher; None = the end."""


class Broadcast:
    """Owner of the watchers. `watched` is called with whether there are any, when that changes."""

    def __init__(
        self,
        view: Shown,
        watched: Callable[[bool], None],
        supervisor: Supervisor,
        *,
        clock: Callable[[], float],
        period_seconds: float = _PERIOD_SECONDS,
    ) -> None:
        self._view = view
        self._watched = watched
        self._supervisor = supervisor
        self._clock = clock
        self._period_seconds = period_seconds
        self._watchers: dict[Messages, float] = {}  # since when, the first ones first
        self._ticking: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.look_seconds = 0.0  # that the last one took

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    @contextmanager
    def watching(self) -> Iterator[Messages]:
        """Be a watcher while the block runs; the first message has everything. Raises RateLimited or Draining."""
        if self._is_stopped:
            raise Draining("Another process serves now, or none. Connect again.", retry_after_seconds=1.0)
        self._make_place()
        if self._ticking is None:
            self._begin()
        messages: Messages = asyncio.Queue(_MOST_UNREAD)
        messages.put_nowait(event("full", self._view.full()))
        self._watchers[messages] = self._clock()
        try:
            yield messages
        finally:
            self._watchers.pop(messages, None)
            if not self._watchers and self._ticking is not None:
                self._end(self._ticking)

    def _make_place(self) -> None:
        """Raises RateLimited if all places are taken, and none for long."""
        if len(self._watchers) < MOST_WATCHERS:
            return
        longest, since = next(iter(self._watchers.items()))
        if self._clock() - since < _KEPT_SECONDS:
            raise RateLimited(f"{MOST_WATCHERS} pages watch this gateway, which is the limit.", retry_after_seconds=5.0)
        self._cut_off(longest)

    def end_streams(self) -> None:
        """End all streams; watchers may connect again."""
        for messages in [*self._watchers]:
            self._cut_off(messages)

    def stop(self) -> None:
        """End all streams and begin no others: the port closes, or another process has taken over."""
        self._is_stopped = True
        self.end_streams()

    def resume(self) -> None:
        """Let streams begin again after a `stop`."""
        self._is_stopped = False

    def _begin(self) -> None:
        self._watched(True)
        self._view.begin()
        self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="dashboard")

    def _end(self, ticking: asyncio.Task[None]) -> None:
        ticking.cancel()
        self._ticking = None
        self._watched(False)
        self._view.end()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(max(self._period_seconds, _TIMES_AS_LONG * self.look_seconds))
            with self._supervisor.guard("dashboard"):
                began = self._clock()
                message = event("tick", self._view.tick())
                self.look_seconds = self._clock() - began
                for messages in [*self._watchers]:
                    if messages.full():
                        self._cut_off(messages)
                    else:
                        messages.put_nowait(message)

    def _cut_off(self, messages: Messages) -> None:
        """The watcher loses its place immediately; its unread messages are dropped."""
        del self._watchers[messages]
        while not messages.empty():
            messages.get_nowait()
        messages.put_nowait(None)


def event(name: str, document: dict[str, Any]) -> bytes:
    """A server-sent event with a JSON document."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(document))
