"""Follows engines' events: a thread reads all of them, and passes the changes to the event loop in small pieces.

The thread releases the interpreter every half millisecond: Python's own switch interval would block the loop ten times
as long.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol, Self

import structlog
import zmq

from gateway.kv_events.endpoints import Source
from gateway.kv_events.stream import Stream
from gateway.supervisor import Supervisor

HANDLER_SECONDS = 0.01  # of one handler before the others run
SLICE_SECONDS = 0.0005  # between pauses
BREATH_SECONDS = 0.0001
FLUSH_SECONDS = 0.02  # changes are collected for this long
FLUSH_CHANGES = 4096  # or until there are this many
UPDATE_CHANGES = 1024  # keys in one update: what the loop does at a time
IDLE_SECONDS = 0.25
MAX_PENDING_UPDATES = 512  # with more of them the reader waits for the loop
REOPEN_SECONDS = 5.0  # after an exception in a stream

log = structlog.get_logger()

Socket = zmq.Socket[bytes]


class Update(NamedTuple):
    """A change of one engine: it was cleared, or its state (live, whole) changed, or its keys."""

    engine: int
    cleared: bool = False
    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    resident_tokens: int = 0
    state: tuple[bool, bool] | None = None


class EventReader:
    """Reads from `start` to `stop`. `deliver` and `pending` are called in the reader's thread."""

    def __init__(
        self,
        deliver: Callable[[list[Update]], None],
        pending: Callable[[], int],
        clock: Callable[[], float],
        supervisor: Supervisor | None = None,
    ) -> None:
        self._deliver = deliver
        self._pending = pending
        self._clock = clock
        self._supervisor = supervisor or Supervisor(clock)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._waker = self._context.socket(zmq.PAIR)
        self._waker.bind("inproc://wakeup")
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._poller = zmq.Poller()
        self._handlers: dict[Socket, tuple[_Followed, Callable[[], None]]] = {}
        self._followed: dict[int, _Followed] = {}  # by engine
        self._stopping = False
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)

    # From the loop's thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._command(self._stop)
        self._thread.join()
        self._context.destroy(linger=0)

    def follow(self, engine: int, backend: str, source: Source) -> None:
        self._command(lambda: self._follow(engine, backend, source))

    def forget(self, engine: int) -> None:
        """Stop reading for an engine, and clear it."""
        self._command(lambda: self._forget(engine))

    def restarted(self, engine: int) -> None:
        self._command(lambda: self._with(engine, Stream.restarted))

    def resize(self, engine: int, capacity_tokens: int | None) -> None:
        self._command(lambda: self._with(engine, lambda stream: stream.ledger.resize(capacity_tokens)))

    def statuses(self) -> list[dict[str, Any]]:
        return [followed.stream.as_dict(engine) for engine, followed in sorted(self._followed.copy().items())]

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with suppress(zmq.Again):  # the reader has been woken already
            self._waker.send(b"", zmq.NOBLOCK)

    # In the reader's thread.

    def _run(self) -> None:
        wakeup = self._context.socket(zmq.PAIR)
        wakeup.connect("inproc://wakeup")
        self._poller.register(wakeup, zmq.POLLIN)
        try:
            while not self._stopping:
                try:
                    self._poll(wakeup)
                except Exception as error:
                    self._supervisor.caught("kv_events", error)
                    time.sleep(IDLE_SECONDS)
                    self._run_commands(wakeup)  # else it could not be stopped
        finally:
            for engine in list(self._followed):
                with self._supervisor.guard("kv_events"):
                    self._forget(engine)
            wakeup.close(linger=0)

    def _poll(self, wakeup: Socket) -> None:
        collecting = any(followed.stream.ledger.pending for followed in self._followed.values())
        ready = self._poller.poll(int((FLUSH_SECONDS if collecting else IDLE_SECONDS) * 1000))
        for socket, _ in ready:
            if socket is wakeup:
                self._run_commands(wakeup)
            elif found := self._handlers.get(socket):
                followed, handle = found
                with self._supervisor.guard("kv_events"):
                    followed.run(handle)
        for followed in list(self._followed.values()):
            with self._supervisor.guard("kv_events"):
                followed.tick()
        while self._pending() > MAX_PENDING_UPDATES and not self._stopping:
            time.sleep(FLUSH_SECONDS)
            self._run_commands(wakeup)

    def _run_commands(self, wakeup: Socket) -> None:
        while wakeup.poll(0):
            wakeup.recv()
        while not self._commands.empty():
            with self._supervisor.guard("kv_events"):
                self._commands.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _follow(self, engine: int, backend: str, source: Source) -> None:
        self._forget(engine)
        followed = _Followed(engine, backend, source, self)
        self._followed[engine] = followed
        followed.run(followed.stream.open)

    def _forget(self, engine: int) -> None:
        if followed := self._followed.pop(engine, None):
            followed.close()

    def _with(self, engine: int, act: Callable[[Stream], None]) -> None:
        if followed := self._followed.get(engine):
            followed.run(lambda: act(followed.stream))


class _Followed:
    """An engine's stream, and the state that was last passed on."""

    def __init__(self, engine: int, backend: str, source: Source, reader: EventReader) -> None:
        self.stream = Stream(backend, source, reader._context, self, reader._clock)
        self._engine = engine
        self._reader = reader
        self._clock = reader._clock
        self._sent_state = (False, False)
        self._flush_at = 0.0
        self._reopen_at: float | None = None
        self._turn_ends = self._breathed = 0.0

    def run(self, handle: Callable[[], None]) -> None:
        """Run a handler of the stream. An exception closes this stream for a while, and no other."""
        self._breathed = self._clock()
        self._turn_ends = self._breathed + HANDLER_SECONDS
        try:
            handle()
        except zmq.ZMQError as error:
            log.warning("kv_events_socket_failed", backend=self.stream.backend, reason=str(error))
            self._close_for_a_while()
        except Exception:
            log.exception("kv_events_stream_failed", backend=self.stream.backend)
            self._close_for_a_while()
        self.flush()

    def _close_for_a_while(self) -> None:
        self.stream.close()
        self._reopen_at = self._clock() + REOPEN_SECONDS

    def tick(self) -> None:
        if self._reopen_at is not None and self._clock() >= self._reopen_at:
            self._reopen_at = None
            self.run(self.stream.open)
        self.run(self.stream.tick)

    def close(self) -> None:
        """Close the stream, and pass on that nothing is known of its engine."""
        self.stream.close()
        self._send(self.stream.ledger.pending > 0)

    def flush(self) -> None:
        pending = self.stream.ledger.pending
        now = self._clock()
        due = pending > 0 and (pending >= FLUSH_CHANGES or now >= self._flush_at)
        if due or (self.stream.trusted, self.stream.whole) != self._sent_state:
            self._flush_at = now + FLUSH_SECONDS
            self._send(pending > 0)

    def _send(self, changed: bool) -> None:
        stream, updates = self.stream, list[Update]()
        if changed:
            cleared, added, removed = stream.ledger.take()
            resident = stream.ledger.resident_tokens
            if cleared:
                updates.append(Update(self._engine, True, resident_tokens=resident))
            for start in range(0, len(removed), UPDATE_CHANGES):
                piece = removed[start : start + UPDATE_CHANGES]
                updates.append(Update(self._engine, removed=piece, resident_tokens=resident))
            for start in range(0, len(added), UPDATE_CHANGES):
                piece = added[start : start + UPDATE_CHANGES]
                updates.append(Update(self._engine, added=piece, resident_tokens=resident))
            if not updates:
                updates.append(Update(self._engine, resident_tokens=resident))
        state = (stream.trusted, stream.whole)
        if state != self._sent_state:
            more, self._sent_state = state > self._sent_state, state
            update = Update(self._engine, resident_tokens=stream.ledger.resident_tokens, state=state)
            updates.insert(len(updates) if more else 0, update)  # a worse state first, a better one last
        if updates:
            self._reader._deliver(updates)

    # Called by the stream.

    def hear(self, socket: Socket, handle: Callable[[], None]) -> None:
        self._reader._handlers[socket] = self, handle
        self._reader._poller.register(socket, zmq.POLLIN)

    def ignore(self, socket: Socket) -> None:
        if self._reader._handlers.pop(socket, None) is not None:
            self._reader._poller.unregister(socket)

    def may_go_on(self) -> bool:
        return self._clock() < self._turn_ends

    def breathe(self) -> None:
        if self._clock() - self._breathed > SLICE_SECONDS:
            time.sleep(BREATH_SECONDS)
            self._breathed = self._clock()


class EngineEvents(Protocol):
    """Receives what engines hold. Called on the event loop, in the order of the events, a few keys at a time."""

    def changed(self, engine: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        """Blocks were stored and removed. The number of resident tokens may be ahead of the keys passed so far."""

    def cleared(self, engine: int) -> None:
        """The engine's cache is empty, or another process's. `changed` follows with the removed keys."""

    def state(self, engine: int, live: bool, whole: bool) -> None:
        """Whether the known keys are kept up to date, and whether they are all that the engine holds."""


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

    async def __aexit__(self, *_: object) -> None:
        reader, self._reader, self._loop = self._reader, None, None
        if reader is not None:
            await asyncio.to_thread(reader.stop)
            self._updates.clear()

    def follow(self, backend: str, sources: Sequence[Source]) -> None:
        """Follow exactly these engines of a backend. Engines that are already followed are not disturbed."""
        wanted: dict[int, Source] = {}
        for source in sources:
            engine = self._engine_number(backend, source.rank)
            if engine is not None:
                wanted.setdefault(engine, source)  # of two sources for one engine, the first
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
        """Start the reader's thread, which does not exist while there is nothing to follow."""
        self._reader = EventReader(self._deliver, lambda: len(self._updates), self._clock, self._supervisor)
        self._reader.start()
        for backend, sources in self._sources.items():
            for engine, source in sources.items():
                self._reader.follow(engine, backend, source)

    def forget(self, backend: str) -> None:
        self.follow(backend, ())
        del self._sources[backend]

    def restarted(self, backend: str) -> None:
        if self._reader is not None:
            for engine in self._sources.get(backend, ()):
                self._reader.restarted(engine)

    def status(self) -> list[dict[str, Any]]:
        return [] if self._reader is None else self._reader.statuses()

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
        """Apply one update per turn of the loop, so that other callbacks run in between."""
        if self._reader is None:
            self._updates.clear()  # the block has ended
        try:
            if self._updates:
                update = self._updates.popleft()
                if update.cleared:
                    self._events.cleared(update.engine)
                elif update.state is not None:
                    self._events.state(update.engine, *update.state)
                else:
                    self._events.changed(update.engine, update.added, update.removed, update.resident_tokens)
        finally:  # an exception in one must not stop the others
            if not self._updates:
                self._waking = False
            if self._updates and self._loop is not None:  # checked again: one may have arrived in between
                self._waking = True
                self._loop.call_soon(self._apply)
