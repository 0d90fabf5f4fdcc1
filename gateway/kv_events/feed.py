"""Follows engines' events: a thread reads all of them, and passes the changes to the event loop in small pieces."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Self

import zmq

from gateway.kv_events.endpoints import Source
from gateway.kv_events.stream import FLUSH_SECONDS, EngineEvents, Stream, Update
from gateway.kv_events.wire import Sockets
from gateway.supervisor import Supervisor

IDLE_SECONDS = 0.25
MAX_PENDING_UPDATES = 512  # with more of them the reader waits for the loop


class EventReader:
    """Reads from `start` to `stop`, in a thread of its own. `deliver` and `pending` are called there."""

    def __init__(
        self,
        events: EngineEvents,
        deliver: Callable[[list[Update]], None],
        pending: Callable[[], int],
        clock: Callable[[], float],
        supervisor: Supervisor,
    ) -> None:
        self._events = events
        self._deliver = deliver
        self._pending = pending
        self._supervisor = supervisor
        self._sockets = Sockets(clock, time.sleep)
        self._waker = self._sockets.context.socket(zmq.PAIR)
        self._waker.bind("inproc://wakeup")
        self._wakeup = self._sockets.context.socket(zmq.PAIR)
        self._wakeup.connect("inproc://wakeup")
        self._sockets.hear(self._wakeup, self._run_commands)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[int, Stream] = {}  # by engine
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)

    # From the loop's thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.call(self._stopping.set)
        self._thread.join()
        self._sockets.context.destroy(linger=0)

    def call(self, method: Callable[..., None], *arguments: object) -> None:
        """Call one of the methods below in the reader's thread."""
        self._commands.put(partial(method, *arguments))
        with suppress(zmq.Again):  # the reader has been woken already
            self._waker.send(b"", zmq.NOBLOCK)

    def statuses(self) -> list[dict[str, Any]]:
        return [stream.as_dict() for _, stream in sorted(self._streams.copy().items())]

    # In the reader's thread.

    def follow(self, backend: str, wanted: dict[int, Source]) -> None:
        """Follow exactly these engines of a backend. Engines that are already followed are not disturbed."""
        for engine, stream in list(self._streams.items()):
            if stream.backend == backend and stream.source != wanted.get(engine):
                self._end(engine)
        for engine, source in wanted.items():
            if known := self._streams.get(engine):
                known.run(partial(known.ledger.resize, source.capacity_tokens))
                continue
            stream = Stream(engine, backend, source, self._sockets, self._events, self._deliver)
            self._streams[engine] = stream
            stream.run(stream.open)

    def restarted(self, backend: str) -> None:
        for stream in self._streams.values():
            if stream.backend == backend:
                stream.run(stream.restarted)

    def _end(self, engine: int) -> None:
        stream = self._streams.pop(engine)
        stream.run(stream.close)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._poll()
                except Exception as error:
                    self._supervisor.caught("kv_events", error)
                    time.sleep(IDLE_SECONDS)
                    self._run_commands()  # else it could not be stopped
        finally:
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
        while self._pending() > MAX_PENDING_UPDATES and not self._stopping.is_set():
            time.sleep(FLUSH_SECONDS)
            self._run_commands()

    def _run_commands(self) -> None:
        while self._wakeup.poll(0):
            self._wakeup.recv()
        while not self._commands.empty():
            with self._supervisor.guard("kv_events"):
                self._commands.get()()


class KvEvents:
    """Follows engines inside its `async with` block; `events` is not called after it.

    All methods are called on the event loop. `engine_number` maps a backend's name and a rank to the number of an
    engine, or None if this engine is not used.
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
        self._wanted: dict[str, dict[int, Source]] = {}  # backend -> engine -> source
        self._updates: deque[Update] = deque()
        self._waking = False
        self._reader: EventReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        if any(self._wanted.values()):
            self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        reader, self._reader, self._loop = self._reader, None, None
        if reader is not None:
            await asyncio.to_thread(reader.stop)
            self._updates.clear()

    def follow(self, backend: str, sources: Sequence[Source]) -> None:
        """Follow exactly these engines of a backend."""
        wanted: dict[int, Source] = {}
        for source in sources:
            engine = self._engine_number(backend, source.rank)
            if engine is not None:
                wanted.setdefault(engine, source)  # of two sources for one engine, the first
        self._wanted[backend] = wanted
        if self._reader is not None:
            self._reader.call(self._reader.follow, backend, wanted)
        elif wanted and self._loop is not None:
            self._start()

    def _start(self) -> None:
        """Start the reader's thread, which does not exist while there is nothing to follow."""
        self._reader = reader = EventReader(
            self._events, self._deliver, lambda: len(self._updates), self._clock, self._supervisor
        )
        reader.start()
        for backend, wanted in self._wanted.items():
            reader.call(reader.follow, backend, wanted)

    def restarted(self, backend: str) -> None:
        if self._reader is not None:
            self._reader.call(self._reader.restarted, backend)

    def status(self) -> list[dict[str, Any]]:
        return [] if self._reader is None else self._reader.statuses()

    def _deliver(self, updates: list[Update]) -> None:
        """Have the loop apply updates; called in the reader's thread."""
        self._updates.extend(updates)
        if not self._waking and self._loop is not None:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._apply)
            except RuntimeError:  # the loop is closed
                self._updates.clear()

    def _apply(self) -> None:
        """Apply one update per turn of the loop, so that other callbacks run in between."""
        if self._reader is None:
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
