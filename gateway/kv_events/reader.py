"""The thread that reads all engines' events, and hands what follows from them to the event loop in small pieces.

It shares the interpreter with the loop, so it lets go of it every half millisecond: waiting for Python's own switch
interval would hold up the loop for ten times as long.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import structlog
import zmq

from gateway.kv_events.endpoints import Source
from gateway.kv_events.stream import Status, Stream
from gateway.supervisor import Supervisor

HANDLER_SECONDS = 0.01  # a handler's time before others have their turn
SLICE_SECONDS = 0.0005  # between breaths
BREATH_SECONDS = 0.0001
FLUSH_SECONDS = 0.02  # changes are collected for so long
FLUSH_CHANGES = 4096  # or until there are so many
UPDATE_CHANGES = 1024  # keys in one update: what the loop does at a time
IDLE_SECONDS = 0.25
MAX_PENDING_UPDATES = 512  # with more of them the reader waits for the loop
REOPEN_SECONDS = 5.0  # after a fault in a stream

log = structlog.get_logger()

Socket = zmq.Socket[bytes]


class Update(NamedTuple):
    """News of one engine: that it was cleared, or its state (live, whole), or what became of its keys."""

    engine: int
    cleared: bool = False
    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    resident_tokens: int = 0
    state: tuple[bool, bool] | None = None


class EventReader:
    """Reads from `start` to `stop`. `deliver` is called in the reader's thread, `pending` too."""

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
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind("inproc://bell")
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
        """End, and wait for the end."""
        self._command(self._stop)
        self._thread.join()
        self._context.destroy(linger=0)

    def follow(self, engine: int, backend: str, source: Source) -> None:
        """Read a source for an engine, in place of what was read for it before."""
        self._command(lambda: self._follow(engine, backend, source))

    def forget(self, engine: int) -> None:
        """Read no more for an engine; it is cleared."""
        self._command(lambda: self._forget(engine))

    def restarted(self, engine: int) -> None:
        """The engine's engine is known to be another process."""
        self._command(lambda: self._with(engine, Stream.restarted))

    def resize(self, engine: int, capacity_tokens: int | None) -> None:
        """The engine's engine is known to have a cache of this size."""

        def resize(stream: Stream) -> None:
            stream.ledger.capacity_tokens = capacity_tokens

        self._command(lambda: self._with(engine, resize))

    def statuses(self) -> dict[int, Status]:
        return {engine: followed.stream.snapshot() for engine, followed in list(self._followed.items())}

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        with suppress(zmq.Again):  # it rings already
            self._bell.send(b"", zmq.NOBLOCK)

    # In the reader's thread.

    def _run(self) -> None:
        ear = self._context.socket(zmq.PAIR)
        ear.connect("inproc://bell")
        self._poller.register(ear, zmq.POLLIN)
        try:
            while not self._stopping:
                try:
                    self._turn(ear)
                except Exception as error:
                    self._supervisor.caught("kv_events", error)
                    time.sleep(IDLE_SECONDS)
                    self._obey(ear)  # or it could never be stopped
        finally:
            for engine in list(self._followed):
                with self._supervisor.guard("kv_events"):
                    self._forget(engine)
            ear.close(linger=0)

    def _turn(self, ear: Socket) -> None:
        collecting = any(followed.stream.ledger.pending for followed in self._followed.values())
        ready = self._poller.poll(int((FLUSH_SECONDS if collecting else IDLE_SECONDS) * 1000))
        for socket, _ in ready:
            if socket is ear:
                self._obey(ear)
            elif found := self._handlers.get(socket):
                followed, handle = found
                with self._supervisor.guard("kv_events"):
                    followed.run(handle)
        for followed in list(self._followed.values()):
            with self._supervisor.guard("kv_events"):
                followed.tick()
        while self._pending() > MAX_PENDING_UPDATES and not self._stopping:
            time.sleep(FLUSH_SECONDS)
            self._obey(ear)

    def _obey(self, ear: Socket) -> None:
        while ear.poll(0):
            ear.recv()
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
    """A stream, the engine that it speaks of, and what was last told of it."""

    def __init__(self, engine: int, backend: str, source: Source, reader: EventReader) -> None:
        self.stream = Stream(backend, source, reader._context, self, reader._clock)
        self._engine = engine
        self._reader = reader
        self._clock = reader._clock
        self._told = (False, False)
        self._flush_at = 0.0
        self._reopen_at: float | None = None
        self._turn_ends = self._breathed = 0.0

    def run(self, handle: Callable[[], None]) -> None:
        """Let the stream do something. A fault in it ends the stream for a while, and no other."""
        self._breathed = self._clock()
        self._turn_ends = self._breathed + HANDLER_SECONDS
        try:
            handle()
        except zmq.ZMQError as error:
            log.warning("kv_events_socket_failed", backend=self.stream.status.backend, reason=str(error))
            self._close_for_a_while()
        except Exception:
            log.exception("kv_events_stream_failed", backend=self.stream.status.backend)
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
        """End the stream and tell that nothing is known of its engine any more."""
        self.stream.close()
        self._tell(self.stream.ledger.pending > 0)

    def flush(self) -> None:
        """Tell what changed, if it is time."""
        pending = self.stream.ledger.pending
        now = self._clock()
        due = pending > 0 and (pending >= FLUSH_CHANGES or now >= self._flush_at)
        if due or (self.stream.trusted, self.stream.whole) != self._told:
            self._flush_at = now + FLUSH_SECONDS
            self._tell(pending > 0)

    def _tell(self, changed: bool) -> None:
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
        if state != self._told:
            more, self._told = state > self._told, state
            told = Update(self._engine, resident_tokens=stream.ledger.resident_tokens, state=state)
            updates.insert(len(updates) if more else 0, told)  # what is dropped is no news of the engine
        if updates:
            self._reader._deliver(updates)

    # What the stream may ask for.

    def hear(self, socket: Socket, handle: Callable[[], None]) -> None:
        """Call `handle` whenever something can be received."""
        self._reader._handlers[socket] = self, handle
        self._reader._poller.register(socket, zmq.POLLIN)

    def ignore(self, socket: Socket) -> None:
        if self._reader._handlers.pop(socket, None) is not None:
            self._reader._poller.unregister(socket)

    def may_go_on(self) -> bool:
        """False = the handler has had its time; it is called again soon."""
        return self._clock() < self._turn_ends

    def breathe(self) -> None:
        """Let go of the interpreter if it was held for a while."""
        if self._clock() - self._breathed > SLICE_SECONDS:
            time.sleep(BREATH_SECONDS)
            self._breathed = self._clock()
