"""One engine's events: subscribing, noticing gaps, and requesting what was missed.

A stream is `live` when it has everything since it began. It is `whole` when it began with an empty cache, or what it
began with is gone by now: after a reset, or when what is known fills the cache.

- First contact: everything that the publisher still has is requested. If that reaches back to its first message, the
  cache is known whole; otherwise the rest is used, and blocks stored before stay unknown until they come again.
- A gap: what is missing is requested. If the publisher no longer has it, all that was known is dropped and the rest is
  used. Live messages wait in the socket meanwhile.
- A new connection: the last message that was used is requested again. If it comes back the same, nothing was lost but
  what follows it; otherwise another process answers, and everything begins anew.
- Without a replay endpoint, a gap or a restart drops all that was known.

All methods run in the reader's thread.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, Protocol

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from gateway.kv_events.endpoints import Source
from gateway.kv_events.ledger import Ledger
from gateway.kv_events.replay import Continuity, MessagePlace, Replay
from gateway.kv_events.wire import MAX_PAYLOAD_BYTES, Cleared, read_batch, read_frames

State = Literal["connecting", "repairing", "live", "lost"]


REPLAY_PATIENCE_SECONDS = 3.0  # until the first message; vLLM looks for requests ten times a second
REPLAY_REST_SECONDS = 30.0  # after a replay endpoint timed out
REOPEN_SECONDS = 10.0  # without a connection; libzmq stops reconnecting after a message that is too large
RECEIVE_QUEUE_MESSAGES = 512  # beyond it messages wait at the publisher; with MAX_PAYLOAD_BYTES they bound memory
FULL = 0.98  # share of a cache
RECONNECT_MS, RECONNECT_MAX_MS = 100, 5000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5000, 15000  # a machine that is gone closes no connection
_SUBSCRIPTION_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.IPV6, 1),
    (zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES),
    (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
    (zmq.RECONNECT_IVL, RECONNECT_MS),
    (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
    (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
    (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
)
# `repairs`: times that all missed messages were received again; `lost_views`: that all known blocks were dropped.
_COUNTS = ("events", "messages", "gaps", "repairs", "restarts", "lost_views", "malformed")

log = structlog.get_logger()


class Turn(Protocol):
    """The part of the reader that a stream uses."""

    def hear(self, socket: "zmq.Socket[bytes]", handle: Callable[[], None]) -> None:
        """Call `handle` whenever something can be received."""

    def ignore(self, socket: "zmq.Socket[bytes]") -> None: ...

    def may_go_on(self) -> bool:
        """False = the handler's time is used up; it is called again soon."""

    def breathe(self) -> None:
        """Let other threads run for a moment."""


class Stream:
    """Follows one source from `open` to `close`."""

    def __init__(
        self,
        backend: str,
        source: Source,
        context: "zmq.Context[zmq.Socket[bytes]]",
        turn: Turn,
        clock: Callable[[], float],
    ) -> None:
        self.source = source
        self.ledger = Ledger(source.capacity_tokens)
        self.backend = backend
        self.counts = Counter[str]()  # since it was first followed
        self._state: State = "connecting"
        self._is_complete = False  # if live: all blocks on the engine are known
        self._last_event_at: float | None = None
        self._context = context
        self._turn = turn
        self._clock = clock
        self._topic = None if source.topic is None else source.topic.encode()
        self._continuity = Continuity()
        self._connected = False
        self._unconnected_since = clock()
        self._unsure = False  # a new connection that nothing proved to be to the same process
        self._held: tuple[int, bytes] | None = None  # the live message that a replay goes before
        self._subscription: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: Replay | None = None
        self._replay_rests_until = 0.0
        self._complaint = ""

    @property
    def trusted(self) -> bool:
        """Whether every block in the ledger is assumed to be on the engine."""
        return self._state == "live" and not self._unsure

    @property
    def whole(self) -> bool:
        """Whether it is trusted, and no block of the engine is missing."""
        return self.trusted and self._is_complete

    def open(self) -> None:
        """Subscribe; zmq connects, and connects again, by itself. Raises ZMQError if it cannot listen."""
        socket = self._context.socket(zmq.SUB)
        self._subscription = socket
        self._unconnected_since = self._clock()
        for option, value in _SUBSCRIPTION_OPTIONS:
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic or b"")
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._turn.hear(socket, self._receive)
        self._turn.hear(self._monitor, self._observe)
        if self.source.bind:
            socket.bind(self.source.endpoint)
        else:
            socket.connect(self.source.endpoint)

    def close(self) -> None:
        """Close the sockets, and drop all that was known."""
        self._end_replay()
        self._close_sockets()
        self._connected = False
        self._forget_process()
        self._state = "connecting"

    def _close_sockets(self) -> None:
        if self._subscription is not None and self._monitor is not None:
            self._turn.ignore(self._subscription)
            self._turn.ignore(self._monitor)
            self._subscription.disable_monitor()
            self._monitor.close()
            self._subscription.close()
        self._subscription = self._monitor = None

    def restarted(self) -> None:
        """Another component found a restart of the backend. A proven connection detects that by itself."""
        if not self._connected or self._unsure:
            self._forget_process()

    def tick(self) -> None:
        unconnected = self._subscription is not None and not self._connected and not self.source.bind
        if unconnected and self._clock() - self._unconnected_since > REOPEN_SECONDS:
            self._close_sockets()
            self.open()
        if self._replay is not None and self._clock() > self._replay.deadline:
            if self._replay.used:
                self._ask()
            else:
                self._replay_failed()

    def as_dict(self, engine: int) -> dict[str, Any]:
        """The state for operators. May be called from another thread; values may then be of neighbouring moments."""
        ledger, at = self.ledger, self._last_event_at
        return {
            "engine": engine,
            "backend": self.backend,
            "rank": self.source.rank,
            "state": self._state,
            "whole": self.whole,
            **{name: self.counts[name] for name in _COUNTS},
            "ignored_events": ledger.ignored_events,  # of other media, or of layers that prove no prefix
            "resident_blocks": ledger.resident_blocks,
            "orphans": ledger.orphans,
            "block_tokens": ledger.block_tokens,
            "last_event_seconds": None if at is None else self._clock() - at,
        }

    # Connections.

    def _observe(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._connected:
                self._now_connected(None)
            elif event == zmq.EVENT_DISCONNECTED and self._connected:
                self._connected = False
                self._unconnected_since = self._clock()
                self._held = None
                self._end_replay()
                self._state = "lost"
                log.info("kv_events_lost", backend=self.backend, rank=self.source.rank)

    def _now_connected(self, held: tuple[int, bytes] | None) -> None:
        self._connected = True
        self._held = held
        log.info("kv_events_connected", backend=self.backend, rank=self.source.rank)
        if self._can_replay():
            self._ask()
            return
        self._unsure = self._continuity.expected is not None
        self._state = "live"
        self._settle()

    # Live messages.

    def _receive(self) -> None:
        self._observe()  # a new connection must be known before its messages
        while self._subscription is not None and self._replay is None and self._turn.may_go_on():
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
            elif self._continuity.place(sequence) is MessagePlace.NEXT:  # received before the connection was lost
                self._take(sequence, payload)
            else:  # it overtook the event of its connection
                self._now_connected((sequence, payload))

    def _live(self, sequence: int, payload: bytes) -> None:
        place = self._continuity.place(sequence)
        if place is MessagePlace.NEXT:
            self._unsure = False
            self._take(sequence, payload)
        elif place is MessagePlace.RESTARTED or self._unsure:
            self._begin_anew((sequence, payload), proven=place is MessagePlace.RESTARTED)
        elif place is MessagePlace.AFTER_GAP:
            self.counts["gaps"] += self._continuity.expected is not None
            self._held = sequence, payload
            if self._can_replay():
                self._ask()
            else:
                self._settle()

    def _settle(self) -> None:
        """Continue with the held message, if there is one; anything still missing before it is lost."""
        held, self._held = self._held, None
        if held is None:
            return
        sequence, payload = held
        expected = self._continuity.expected
        if self._unsure and expected is not None and sequence != expected:
            self._begin_anew(held, proven=sequence < expected)
        elif expected is None:
            self._begin_with(sequence, payload)
        elif sequence > expected:
            self._drop_view()
            self._begin_with(sequence, payload, whole=False)
        elif sequence == expected:
            self._unsure = False
            self._take(sequence, payload)

    def _begin_with(self, sequence: int, payload: bytes, whole: bool = True) -> None:
        self._is_complete = whole and sequence == 0
        self._continuity.begin(sequence)
        self._take(sequence, payload)

    def _begin_anew(self, held: tuple[int, bytes] | None, *, proven: bool) -> None:
        """Start over: another process publishes, with another cache, or that cannot be ruled out."""
        self._forget_process()
        if proven:
            self.counts["restarts"] += 1
            self.ledger.clear()
        else:
            self._lost_view()
        self._end_replay()
        self._held = held
        if held is not None:
            self._continuity.place(held[0])
        if self._can_replay():
            self._ask()
        else:
            self._state = "live"
            self._settle()

    def _forget_process(self) -> None:
        self.ledger.forget()
        self._continuity.reset()
        self._unsure = self._is_complete = False

    def _drop_view(self) -> None:
        self.ledger.drop()
        self._lost_view()

    def _lost_view(self) -> None:
        self._is_complete = False
        self.counts["lost_views"] += 1
        log.warning("kv_events_missed", backend=self.backend, rank=self.source.rank)

    def _take(self, sequence: int, payload: bytes) -> None:
        self._continuity.took(sequence, payload)
        self.counts["messages"] += 1
        self._last_event_at = self._clock()
        try:
            batch = read_batch(payload, self._turn.breathe)
        except ValueError as error:
            self._complain(error)
            self._drop_view()  # its changes are lost
            return
        self.counts["events"] += len(batch.events)
        apply, breathe, overflows = self.ledger.apply, self._turn.breathe, self.ledger.overflows
        for event in batch.events:
            apply(event)
            breathe()
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
        proving = self._continuity.can_prove
        start = (self._continuity.expected or 0) - proving
        deadline = self._clock() + REPLAY_PATIENCE_SECONDS
        self._replay = Replay(self._context, self.source.replay, start, deadline, proving=proving)
        self._turn.hear(self._replay.socket, self._receive_replay)
        if self._subscription is not None:
            self._turn.ignore(self._subscription)  # live messages wait
        self._state = "repairing"

    def _end_replay(self) -> None:
        if self._replay is None:
            return
        self._turn.ignore(self._replay.socket)
        self._replay.close()
        self._replay = None
        if self._subscription is not None:
            self._turn.hear(self._subscription, self._receive)

    def _receive_replay(self) -> None:
        replay = self._replay
        if replay is None:
            return
        for sequence, payload in replay.messages(self._clock):
            self._replayed(replay, sequence, payload)
            if self._replay is not replay or not self._turn.may_go_on():
                return
        if replay.ended:
            self._replay_ended(replay)

    def _replayed(self, replay: Replay, sequence: int, payload: bytes) -> None:
        expected = self._continuity.expected
        if replay.proving and replay.received == 1:
            if not self._continuity.proves(sequence, payload):
                self._begin_anew(self._held, proven=expected is not None and sequence < expected)
        elif replay.accepts(sequence, expected):
            if expected is None:
                self._begin_with(sequence, payload)
            elif sequence == expected:
                self._take(sequence, payload)
            else:  # the buffer does not reach back as far
                self._drop_view()
                self._begin_with(sequence, payload, whole=False)

    def _replay_ended(self, replay: Replay) -> None:
        if replay.is_unproven:  # not even the message that was used is there
            self._begin_anew(self._held, proven=True)
        elif replay.torn:
            self._ask()
        else:
            if self._continuity.expected is None:  # nothing was ever published
                self._continuity.begin(0)
                self._is_complete = True
            self._unsure = False
            self.counts["repairs"] += 1
            self._end_replay()
            self._state = "live"
            self._settle()

    def _replay_failed(self) -> None:
        log.warning("kv_events_replay_failed", backend=self.backend, endpoint=self.source.replay)
        self._replay_rests_until = self._clock() + REPLAY_REST_SECONDS
        self._unsure = self._replay is not None and self._replay.is_unproven
        self._end_replay()
        self._state = "live"
        self._settle()

    def _complain(self, error: ValueError) -> None:
        """Count a malformed message, and log each reason once."""
        self.counts["malformed"] += 1
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("kv_events_malformed", backend=self.backend, reason=self._complaint)
