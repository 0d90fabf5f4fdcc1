"""The way from the reader's thread to the event loop, and the part's face to the rest of the gateway."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.kv_events.endpoints import Source
from gateway.kv_events.reader import EventReader, Update
from gateway.supervisor import Supervisor


class EngineEvents(Protocol):
    """Who is told what engines hold. Called on the event loop, in the order of the events, a few keys at a time."""

    def changed(self, engine: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        """Blocks came and went. Tokens are those that the engine holds by now, maybe ahead of the keys told so far."""

    def cleared(self, engine: int) -> None:
        """The engine's cache is empty, or another process's. The keys that went are told by `changed`."""

    def state(self, engine: int, live: bool, whole: bool) -> None:
        """Whether what was told is kept up to date, and whether it is all that the engine holds."""


class KvEvents:
    """Follows engines inside its `async with` block; nothing is told after it.

    All methods are called on the event loop. `engine_number` maps a backend's name and a rank to the number of
    an engine, or None if there is none.
    """

    def __init__(
        self,
        events: EngineEvents,
        engine_number: Callable[[str, int], int | None],
        clock: Callable[[], float],
        supervisor: Supervisor | None = None,
    ) -> None:
        self._events = events
        self._engine_number = engine_number
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self._sources: dict[str, dict[int, Source]] = {}  # backend -> engine -> source
        self._updates: deque[Update] = deque()
        self._waking = False
        self._reader: EventReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        if any(self._sources.values()):
            self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reader, self._reader, self._loop = self._reader, None, None
        if reader is not None:
            await asyncio.to_thread(reader.stop)
            self._updates.clear()

    def follow(self, backend: str, sources: Sequence[Source]) -> None:
        """Follow exactly these engines of a backend. What is followed already goes on undisturbed."""
        wanted: dict[int, Source] = {}
        for source in sources:
            engine = self._engine_number(backend, source.rank)
            if engine is not None:
                wanted.setdefault(engine, source)  # of two engines for one engine, the first
        known = self._sources.get(backend, {})
        self._sources[backend] = wanted
        if self._reader is None:
            if wanted and self._loop is not None:
                self._start()
            return
        for engine in known.keys() - wanted.keys():
            self._reader.forget(engine)
        for engine, source in wanted.items():
            if known.get(engine) != source:
                self._reader.follow(engine, backend, source)
            elif known[engine].capacity_tokens != source.capacity_tokens:
                self._reader.resize(engine, source.capacity_tokens)

    def _start(self) -> None:
        """Begin to read; with nothing to follow there is no thread."""
        self._reader = EventReader(self._deliver, lambda: len(self._updates), self._clock, self._supervisor)
        self._reader.start()
        for backend, sources in self._sources.items():
            for engine, source in sources.items():
                self._reader.follow(engine, backend, source)

    def forget(self, backend: str) -> None:
        """Follow none of a backend's engines."""
        self.follow(backend, ())
        del self._sources[backend]

    def restarted(self, backend: str) -> None:
        """The backend is known to be another process than before."""
        if self._reader is not None:
            for engine in self._sources.get(backend, ()):
                self._reader.restarted(engine)

    def status(self) -> list[dict[str, Any]]:
        """How each stream does, for operators."""
        if self._reader is None:
            return []
        now = self._clock()
        return [status.told(engine, now) for engine, status in sorted(self._reader.statuses().items())]

    # In the reader's thread.

    def _deliver(self, updates: list[Update]) -> None:
        self._updates.extend(updates)
        if not self._waking and self._loop is not None:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._apply)
            except RuntimeError:  # the loop is closed
                self._updates.clear()

    # On the loop.

    def _apply(self) -> None:
        """One update each turn of the loop, so that others have theirs."""
        if self._reader is None:
            self._updates.clear()  # it is over
        try:
            if self._updates:
                self._tell(self._updates.popleft())
        finally:  # a fault in one must not keep back all others
            if not self._updates:
                self._waking = False
            if self._updates and self._loop is not None:  # again: one may have come between
                self._waking = True
                self._loop.call_soon(self._apply)

    def _tell(self, update: Update) -> None:
        if update.cleared:
            self._events.cleared(update.engine)
        elif update.state is not None:
            self._events.state(update.engine, *update.state)
        else:
            self._events.changed(update.engine, update.added, update.removed, update.resident_tokens)
