"""Follows engines' events: a thread reads all of them, and passes the changes to the event loop in small pieces."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Self

from gateway.core.supervisor import Supervisor
from gateway.core.threads import Threads
from gateway.features.exact.endpoints import Source
from gateway.features.exact.events import Sockets
from gateway.features.exact.stream import FLUSH_SECONDS, EngineEvents, Stream, Update

IDLE_SECONDS = 0.25
MAX_PENDING_UPDATES = 512  # with more of them the thread waits for the loop


class KvEvents:
    """Follows engines inside its `async with` block; `events` is not called after it.

    `engine_number` maps a backend's name and a rank to the number of an engine, or None if this engine is not used.
    The thread does not exist while there is nothing to follow.
    """

    _sockets: Sockets  # of the thread, while it exists

    def __init__(
        self,
        events: EngineEvents,
        engine_number: Callable[[str, int], int | None],
        clock: Callable[[], float],
        *,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._events = events
        self._engine_number = engine_number
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self._wanted: dict[str, dict[int, Source]] = {}  # backend -> engine -> source
        self._streams: dict[int, Stream] = {}  # by engine; the thread's
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()  # to the thread
        self._updates: deque[Update] = deque()  # to the loop
        self._waking = False  # of the loop
        self._stopping = Event()
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # On the event loop.

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        if any(self._wanted.values()):
            self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        thread, self._thread, self._loop = self._thread, None, None
        if thread is not None:
            await Threads("kv_events").run(self._stop, thread)
            self._updates.clear()

    def subscribe(self, backend: str, sources: Sequence[Source]) -> None:
        """Follow exactly these engines of a backend."""
        wanted: dict[int, Source] = {}
        for source in sources:
            engine = self._engine_number(backend, source.rank)
            if engine is not None:
                wanted.setdefault(engine, source)  # of two sources for one engine, the first
        self._wanted[backend] = wanted
        if self._thread is not None:
            self._call(self._follow, backend, wanted)
        elif wanted and self._loop is not None:
            self._start()

    def restarted(self, backend: str) -> None:
        if self._thread is not None:
            self._call(self._restarted, backend)

    def status(self) -> list[dict[str, Any]]:
        return [stream.as_dict() for _, stream in sorted(self._streams.copy().items())]

    def _start(self) -> None:
        self._sockets = Sockets(self._clock, time.sleep)
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        for backend, wanted in self._wanted.items():
            self._call(self._follow, backend, wanted)

    def _stop(self, thread: Thread) -> None:
        self._call(self._stopping.set)
        thread.join()
        self._sockets.context.destroy(linger=0)

    def _call(self, method: Callable[..., None], *arguments: object) -> None:
        self._commands.put(partial(method, *arguments))
        self._sockets.wake()

    def _apply(self) -> None:
        """Apply one update per turn of the loop, so that other callbacks run in between."""
        if self._loop is None:
            self._updates.clear()  # the block has ended
        try:
            if self._updates:
                self._updates.popleft()()
        finally:  # an exception in one must not stop the others
            if not self._updates:
                self._waking = False
            if self._updates and self._loop is not None:  # checked again: one may have arrived in between
                self._waking = True
                self._loop.call_soon(self._apply)

    # In the thread.

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._poll()
            except Exception as error:
                self._supervisor.caught("kv_events", error)
                time.sleep(IDLE_SECONDS)
            self._run_commands()
        for engine in list(self._streams):
            with self._supervisor.guard("kv_events"):
                self._end(engine)

    def _poll(self) -> None:
        collecting = any(stream.ledger.pending for stream in self._streams.values())
        for handle in self._sockets.ready(FLUSH_SECONDS if collecting else IDLE_SECONDS):
            with self._supervisor.guard("kv_events"):
                handle()
        for stream in list(self._streams.values()):
            with self._supervisor.guard("kv_events"):
                stream.run(stream.tick)
        while len(self._updates) > MAX_PENDING_UPDATES and not self._stopping.is_set():
            time.sleep(FLUSH_SECONDS)
            self._run_commands()

    def _run_commands(self) -> None:
        while not self._commands.empty():
            with self._supervisor.guard("kv_events"):
                self._commands.get()()

    def _follow(self, backend: str, wanted: dict[int, Source]) -> None:
        """Follow exactly these engines of a backend. Engines that are already followed are not disturbed."""
        for engine, stream in list(self._streams.items()):
            if stream.backend == backend and stream.source != wanted.get(engine):
                self._end(engine)
        for engine, source in wanted.items():
            if known := self._streams.get(engine):
                known.ledger.resize(source.capacity_tokens)
                continue
            stream = Stream(
                engine, backend, source=source, sockets=self._sockets, events=self._events, deliver=self._deliver
            )
            self._streams[engine] = stream
            stream.run(stream.open)

    def _restarted(self, backend: str) -> None:
        for stream in self._streams.values():
            if stream.backend == backend:
                stream.run(stream.restarted)

    def _end(self, engine: int) -> None:
        stream = self._streams.pop(engine)
        stream.run(stream.close)

    def _deliver(self, updates: list[Update]) -> None:
        self._updates.extend(updates)
        if not self._waking and self._loop is not None:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._apply)
            except RuntimeError:  # the loop is closed
                self._updates.clear()
