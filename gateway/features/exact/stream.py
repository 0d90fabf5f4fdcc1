"""One engine's events: subscribing, detecting gaps, and requesting missed messages.

A stream is `live` when it has everything since it began. It is `whole` when it began with an empty cache, or the blocks
from before are gone: after a reset, or when the known blocks fill the cache.

- First contact: all messages in the publisher's buffer are requested. If they reach back to its first message, the
  cache is known whole; otherwise they are used, and blocks stored before stay unknown until they come again.
- A gap: the missing messages are requested. If the publisher has dropped them, all known blocks are dropped and the
  rest is used. Live messages wait in the socket meanwhile.
- A new connection: the last used message is requested again. If it comes back the same, only its successors were lost;
  otherwise another process answers, and everything begins anew.
- Without a replay endpoint, a gap or a restart drops all known blocks.

vLLM numbers its messages from 0 in each process. It answers a request for missed messages from a buffer of its last
ones, then sends an end marker. Its socket silently drops messages for a slow receiver, so an answer can have holes, or
no end; it is then requested again from there. Each request has a connection of its own, so that a late answer is never
mistaken for the answer to the next. Missed messages arrive a second time as live ones, which is no restart: a restart
is a live number that is not above the live number before it.

All methods run in the reader's thread, except for `as_dict`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import structlog
import zmq
from xxhash import xxh3_64_intdigest
from zmq.utils.monitor import recv_monitor_message

from gateway.features.exact.endpoints import Source
from gateway.features.exact.events import SEQUENCE_BYTES, Cleared, Ledger, Socket, Sockets, read_events, read_frames

FLUSH_SECONDS = 0.02  # changes are collected for this long
FLUSH_CHANGES = 4096  # or until there are this many
UPDATE_CHANGES = 1024  # keys in one update, processed by the loop without a break
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
REPLAY_PATIENCE_SECONDS = 3.0  # until the first replayed message; vLLM looks for requests ten times a second
PAUSE_SECONDS = 1.0  # until the next one, or the end marker
REPLAY_REST_SECONDS = 30.0  # after a replay endpoint timed out
RETRY_SECONDS = 5.0  # after an exception
REOPEN_SECONDS = 10.0  # without a connection; libzmq stops reconnecting after a message that is too large
FULL = 0.98  # share of a cache
# `repairs`: times that all missed messages were received again; `lost_views`: that all known blocks were dropped.
_COUNTS = ("events", "messages", "gaps", "repairs", "restarts", "lost_views", "malformed")

log = structlog.get_logger()

# Position of a live message in its sequence; "repeated": already received by a replay.
MessagePlace = Literal["next", "repeated", "after_gap", "restarted"]


class Continuity:
    """Sequence numbers of one publisher. `expected` None = nothing was received or requested yet."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self._last_live: int | None = None
        self._last_digest: int | None = None

    def begin(self) -> None:
        """Nothing was published yet, so the first message is the next one."""
        self.expected = 0

    def place(self, sequence: int) -> MessagePlace:
        """Judge a live message; to be called once for each, in order."""
        last, self._last_live = self._last_live, sequence
        if last is not None and sequence <= last:
            return "restarted"
        if self.expected is None or sequence > self.expected:
            return "after_gap"
        return "next" if sequence == self.expected else "repeated"

    def took(self, sequence: int, payload: bytes) -> None:
        self.expected = sequence + 1
        self._last_digest = xxh3_64_intdigest(payload)

    def proves(self, sequence: int, payload: bytes) -> bool:
        """Whether this is the last message that was used, again: the process is the same."""
        return sequence + 1 == self.expected and xxh3_64_intdigest(payload) == self._last_digest


class Replay:
    """One request for the messages from `expected` on, sent on creation, and its answer. The owner closes it."""

    def __init__(self, sockets: Sockets, endpoint: str, expected: int) -> None:
        self.proving = expected > 0  # the first message is the last used one, requested again as a proof
        self.received = 0
        self.ended = False
        self.deadline = sockets.clock() + REPLAY_PATIENCE_SECONDS
        self._clock = sockets.clock
        self.socket = sockets.context.socket(zmq.DEALER)
        self.socket.connect(endpoint)
        self.socket.send_multipart([b"", max(0, expected - 1).to_bytes(SEQUENCE_BYTES, "big")])

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Sequence numbers and payloads that have arrived; `ended` is set once the end marker has."""
        while not self.ended:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) < 3 or len(frames[-2]) != SEQUENCE_BYTES:
                continue
            if frames[-2] == END_OF_REPLAY and not frames[-1]:
                self.ended = True
            else:
                self.received += 1
                self.deadline = self._clock() + PAUSE_SECONDS
                yield int.from_bytes(frames[-2], "big"), frames[-1]

    @property
    def is_unproven(self) -> bool:
        return self.proving and not self.received


class EngineEvents(Protocol):
    """Receives the blocks of engines. Called on the event loop, in the order of the events, a few keys at a time."""

    def changed(self, engine: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        """Blocks were stored and removed. The number of resident tokens may be ahead of the passed keys."""

    def cleared(self, engine: int) -> None:
        """The engine's cache is empty, or another process's. `changed` follows with the removed keys."""

    def state(self, engine: int, live: bool, whole: bool) -> None:
        """Whether the known keys are kept up to date, and whether they are all that the engine holds."""


Update = Callable[[], None]  # a call of one of these methods
Deliver = Callable[[list[Update]], None]


class Stream:
    """Follows one source from `open` to `close`, and passes changes of its engine on."""

    def __init__(
        self, engine: int, backend: str, *, source: Source, sockets: Sockets, events: EngineEvents, deliver: Deliver
    ) -> None:
        self.source = source
        self.ledger = Ledger(source.capacity_tokens)
        self.backend = backend
        self.counts = dict.fromkeys(_COUNTS, 0)  # since it was first followed
        self._engine = engine
        self._events = events
        self._deliver = deliver
        self._sockets = sockets
        self._clock = sockets.clock
        self._topic = None if source.topic is None else source.topic.encode()
        self._continuity = Continuity()
        self._connected: bool | None = None  # None = not once
        self._reopen_at: float | None = None
        self._is_complete = False  # if live: all blocks on the engine are known
        self._unsure = False  # a new connection that nothing proved to be to the same process
        self._held: tuple[int, bytes] | None = None  # the live message that a replay goes before
        self._subscription: Socket | None = None
        self._monitor: Socket | None = None
        self._replay: Replay | None = None
        self._replay_rests_until = 0.0
        self._last_event_at: float | None = None
        self._complaint = ""
        self._sent_view = (False, False)
        self._flush_at = 0.0

    @property
    def state(self) -> str:
        if self._replay is not None:
            return "repairing"
        return "live" if self._connected else "connecting" if self._connected is None else "lost"

    @property
    def view(self) -> tuple[bool, bool]:
        """Whether it is live, so that the ledger's blocks are on the engine, and whether it is whole."""
        live = self.state == "live" and not self._unsure
        return live, live and self._is_complete

    def as_dict(self) -> dict[str, Any]:
        """The state for operators. May be called from another thread; values may then be of neighbouring moments."""
        ledger, at = self.ledger, self._last_event_at
        return {
            "engine": self._engine,
            "backend": self.backend,
            "rank": self.source.rank,
            "state": self.state,
            "whole": self.view[1],
            **self.counts,
            "ignored_events": ledger.ignored_events,  # of other media, or of layers that prove no prefix
            "resident_blocks": ledger.resident_blocks,
            "orphans": ledger.orphans,
            "block_tokens": ledger.block_tokens,
            "last_event_seconds": None if at is None else self._clock() - at,
        }

    def run(self, handle: Callable[..., None], *arguments: Any) -> None:
        """Run a handler of the stream. An exception closes this stream for a while, and no other."""
        self._sockets.begin_turn()
        try:
            handle(*arguments)
        except Exception as error:
            if isinstance(error, zmq.ZMQError):
                log.warning("kv_events_socket_failed", backend=self.backend, reason=str(error))
            else:
                log.exception("kv_events_stream_failed", backend=self.backend)
            self._reopen_at = self._clock() + RETRY_SECONDS
            self.close()
        self._flush()

    def open(self) -> None:
        """Subscribe; zmq connects, and connects again, by itself. Raises ZMQError if it cannot listen."""
        self._subscription = socket = self._sockets.context.socket(zmq.SUB)
        self._reopen_at = None if self.source.bind else self._clock() + REOPEN_SECONDS
        socket.setsockopt(zmq.SUBSCRIBE, self._topic or b"")
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._sockets.hear(socket, partial(self.run, self._receive))
        self._sockets.hear(self._monitor, partial(self.run, self._observe))
        if self.source.bind:
            socket.bind(self.source.endpoint)
        else:
            socket.connect(self.source.endpoint)

    def close(self) -> None:
        """Close the sockets; nothing is known of the engine then."""
        self._end_replay()
        self._close_sockets()
        self._connected = self._held = None
        self._forget_process()
        self._flush_at = 0.0

    def _close_sockets(self) -> None:
        if self._subscription is not None and self._monitor is not None:
            self._sockets.ignore(self._subscription)
            self._sockets.ignore(self._monitor)
            self._subscription.disable_monitor()
            self._monitor.close()
            self._subscription.close()
        self._subscription = self._monitor = None

    def restarted(self) -> None:
        """Another component found a restart of the backend. A proven connection detects that by itself."""
        if not self._connected or self._unsure:
            self._forget_process()

    def tick(self) -> None:
        if self._reopen_at is not None and self._clock() >= self._reopen_at:
            self._close_sockets()
            self.open()
        if self._replay is not None and self._clock() > self._replay.deadline:
            if self._replay.received > self._replay.proving:
                self._ask()
            else:
                self._replay_failed(self._replay)

    # Connections.

    def _observe(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._connected:
                self._now_connected()
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                self._connected = False
                self._reopen_at = None if self.source.bind else self._clock() + REOPEN_SECONDS
                self._held = None
                self._end_replay()
                log.info("kv_events_lost", backend=self.backend, rank=self.source.rank)

    def _now_connected(self) -> None:
        self._connected, self._reopen_at = True, None
        log.info("kv_events_connected", backend=self.backend, rank=self.source.rank)
        if not self._can_replay():
            self._unsure = self._continuity.expected is not None
        self._catch_up()

    # Live messages.

    def _receive(self) -> None:
        self._observe()  # a new connection must be known before its messages
        while self._subscription is not None and self._replay is None and self._sockets.may_go_on():
            try:
                frames = self._subscription.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                topic, sequence, payload = read_frames(frames)
            except ValueError as error:
                self._complain(error)
                continue
            if self._topic is not None and topic != self._topic:
                continue  # a subscription matches all topics with this prefix
            if self._connected:
                self._live(sequence, payload)
            elif self._continuity.place(sequence) == "next":  # received before the connection was lost
                self._take(sequence, payload)
            else:  # it overtook the event of its connection
                self._held = sequence, payload
                self._now_connected()

    def _live(self, sequence: int, payload: bytes) -> None:
        place = self._continuity.place(sequence)
        if place == "next":
            self._unsure = False
            self._take(sequence, payload)
        elif place == "restarted" or self._unsure:
            self._held = sequence, payload
            self._begin_anew(proven=place == "restarted")
        elif place == "after_gap":
            self.counts["gaps"] += self._continuity.expected is not None
            self._held = sequence, payload
            self._catch_up()

    def _catch_up(self) -> None:
        """Request the messages missed before the held one, if possible, and then continue with it."""
        if self._can_replay():
            self._ask()
        else:
            self._settle()

    def _settle(self) -> None:
        """Continue with the held message, if there is one; anything still missing before it is lost."""
        if self._held is None:
            return
        (sequence, payload), expected = self._held, self._continuity.expected
        if self._unsure and expected is not None and sequence != expected:
            self._begin_anew(proven=sequence < expected)
        else:
            self._held, self._unsure = None, False
            self._use(sequence, payload)

    def _begin_anew(self, *, proven: bool) -> None:
        """Start over: another process publishes, with another cache, or that cannot be ruled out."""
        self._forget_process()
        if proven:
            self.counts["restarts"] += 1
            self.ledger.clear()
        else:
            self._lost_view()
        self._end_replay()
        if self._held is not None:
            self._continuity.place(self._held[0])
        self._catch_up()

    def _forget_process(self) -> None:
        self.ledger.forget()
        self._continuity = Continuity()
        self._unsure = self._is_complete = False

    def _drop_view(self) -> None:
        self.ledger.drop()
        self._lost_view()

    def _lost_view(self) -> None:
        self._is_complete = False
        self.counts["lost_views"] += 1
        log.warning("kv_events_missed", backend=self.backend, rank=self.source.rank)

    def _use(self, sequence: int, payload: bytes) -> None:
        """Take a message, unless it was taken before; missing messages before it are lost."""
        expected = self._continuity.expected
        if expected is None:
            self._is_complete = sequence == 0
        elif sequence > expected:
            self._drop_view()
        if expected is None or sequence >= expected:
            self._take(sequence, payload)

    def _take(self, sequence: int, payload: bytes) -> None:
        self._continuity.took(sequence, payload)
        self.counts["messages"] += 1
        self._last_event_at = self._clock()
        try:
            events = read_events(payload, self._sockets.breathe)
        except ValueError as error:
            self._complain(error)
            self._drop_view()  # its changes are lost
            return
        self.counts["events"] += len(events)
        overflows = self.ledger.overflows
        for event in events:
            self.ledger.update(event)
            self._sockets.breathe()
            if isinstance(event, Cleared):
                self._is_complete = True  # nothing is cached that is not known
        if self.ledger.overflows != overflows:
            self._lost_view()
        if not self._is_complete and self.ledger.fullness > FULL:
            self._is_complete = True  # there is no room for blocks that are not known

    # Missed messages.

    def _can_replay(self) -> bool:
        return self.source.replay is not None and self._clock() >= self._replay_rests_until

    def _ask(self) -> None:
        """Request all messages after the last used one, and that one again, as a proof."""
        assert self.source.replay is not None
        self._end_replay()
        self._replay = Replay(self._sockets, self.source.replay, self._continuity.expected or 0)
        self._sockets.hear(self._replay.socket, partial(self.run, self._receive_replay, self._replay))
        if self._subscription is not None:
            self._sockets.ignore(self._subscription)  # live messages wait

    def _end_replay(self) -> None:
        if self._replay is None:
            return
        self._sockets.ignore(self._replay.socket)
        self._replay.socket.close()
        self._replay = None
        if self._subscription is not None:
            self._sockets.hear(self._subscription, partial(self.run, self._receive))

    def _receive_replay(self, replay: Replay) -> None:
        for sequence, payload in replay.messages():
            expected = self._continuity.expected
            if replay.proving and replay.received == 1:
                if not self._continuity.proves(sequence, payload):
                    self._begin_anew(proven=expected is not None and sequence < expected)
            elif replay.received > 1 and expected is not None and sequence > expected:
                self._ask()  # for missing messages in the middle
            else:
                self._use(sequence, payload)  # later than expected: the buffer does not reach back as far
            if self._replay is not replay or not self._sockets.may_go_on():
                return
        if replay.ended and replay.is_unproven:  # not even the message that was used is there
            self._begin_anew(proven=True)
        elif replay.ended:
            if self._continuity.expected is None:  # nothing was ever published
                self._continuity.begin()
                self._is_complete = True
            self._unsure = False
            self.counts["repairs"] += 1
            self._end_replay()
            self._settle()

    def _replay_failed(self, replay: Replay) -> None:
        log.warning("kv_events_replay_failed", backend=self.backend, endpoint=self.source.replay)
        self._replay_rests_until = self._clock() + REPLAY_REST_SECONDS
        self._unsure = replay.is_unproven
        self._end_replay()
        self._settle()

    def _complain(self, error: ValueError) -> None:
        """Count a malformed message, and log each reason once."""
        self.counts["malformed"] += 1
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("kv_events_malformed", backend=self.backend, reason=self._complaint)

    # Passing changes on.

    def _flush(self) -> None:
        """Pass changes on if there are many or the first is old, and a new state immediately."""
        pending, now, view = self.ledger.pending, self._clock(), self.view
        is_due = pending > 0 and (pending >= FLUSH_CHANGES or now >= self._flush_at)
        if not is_due and view == self._sent_view:
            return
        updates, is_better = self._changes(), view > self._sent_view
        if view != self._sent_view:
            update = partial(self._events.state, self._engine, *view)
            updates.insert(len(updates) if is_better else 0, update)  # a worse state first, a better one last
        self._flush_at, self._sent_view = now + FLUSH_SECONDS, view
        self._deliver(updates)

    def _changes(self) -> list[Update]:
        if not self.ledger.pending:
            return []
        cleared, added, removed = self.ledger.take()
        engine, changed, tokens, size = self._engine, self._events.changed, self.ledger.resident_tokens, UPDATE_CHANGES
        updates: list[Update] = [partial(self._events.cleared, engine)] if cleared else []
        updates += [partial(changed, engine, (), removed[i : i + size], tokens) for i in range(0, len(removed), size)]
        updates += [partial(changed, engine, added[i : i + size], (), tokens) for i in range(0, len(added), size)]
        return updates or [partial(changed, engine, (), (), tokens)]
