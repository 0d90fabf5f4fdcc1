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

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from gateway.kv_events.endpoints import Source
from gateway.kv_events.ledger import Ledger
from gateway.kv_events.replay import Continuity, MessagePlace, Replay
from gateway.kv_events.wire import MAX_PAYLOAD_BYTES, Cleared, read_batch, read_frames

State = Literal["connecting", "repairing", "live", "lost"]


@dataclass(slots=True)
class Status:
    """One engine's stream. Counts are since it was first followed."""

    backend: str
    rank: int
    state: State = "connecting"
    whole: bool = False  # all that the engine holds is known
    last_event_at: float | None = None  # on the clock that the stream was given
    events: int = 0
    messages: int = 0
    gaps: int = 0
    repairs: int = 0  # times that all missed messages were had again
    restarts: int = 0
    lost_views: int = 0  # times that what was known had to be dropped
    malformed: int = 0
    ignored_events: int = 0  # of other media, or of layers that prove no prefix
    resident_blocks: int = 0
    orphans: int = 0  # blocks whose prefix is not known
    block_tokens: int = 0

    def told(self, engine: int, now: float) -> dict[str, Any]:
        fields = asdict(self)
        at = fields.pop("last_event_at")
        return {"engine": engine, **fields, "last_event_seconds": None if at is None else now - at}


REPLAY_PATIENCE_SECONDS = 3.0  # until the first message; vLLM looks for requests ten times a second
REPLAY_PAUSE_SECONDS = 1.0  # until the next one, or the end marker
REPLAY_REST_SECONDS = 30.0  # after a replay endpoint did not answer
REOPEN_SECONDS = 10.0  # without a connection; libzmq connects no more after a message that is too large
RECEIVE_QUEUE_MESSAGES = 512  # beyond it messages wait at the publisher; with MAX_PAYLOAD_BYTES they bound memory
FULL = 0.98  # share of a cache
RECONNECT_MS, RECONNECT_MAX_MS = 100, 5000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5000, 15000  # a machine that is gone says nothing
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

log = structlog.get_logger()


class Turn(Protocol):
    """The reader's turn, as a stream sees it."""

    def hear(self, socket: "zmq.Socket[bytes]", handle: Callable[[], None]) -> None:
        """Call `handle` whenever something can be received."""

    def ignore(self, socket: "zmq.Socket[bytes]") -> None: ...

    def may_go_on(self) -> bool:
        """False = the handler has had its time; it is called again soon."""

    def breathe(self) -> None:
        """A moment when other threads may run."""


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
        self.status = Status(backend, source.rank)
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
        """Whether the ledger holds nothing that the engine is not thought to hold."""
        return self.status.state == "live" and not self._unsure

    @property
    def whole(self) -> bool:
        """Whether it is trusted, and nothing that the engine holds is missing."""
        return self.trusted and self.status.whole

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
        """End it. What was known is dropped."""
        self._end_replay()
        self._close_sockets()
        self._connected = False
        self._forget_process()
        self.status.state = "connecting"

    def _close_sockets(self) -> None:
        if self._subscription is not None and self._monitor is not None:
            self._turn.ignore(self._subscription)
            self._turn.ignore(self._monitor)
            self._subscription.disable_monitor()
            self._monitor.close()
            self._subscription.close()
        self._subscription = self._monitor = None

    def restarted(self) -> None:
        """Somebody else found that another process serves now. A connection that is proven tells that by itself."""
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

    def snapshot(self) -> Status:
        """The status now. May be called from another thread; values may then be of neighbouring moments."""
        ledger = self.ledger
        return replace(
            self.status,
            whole=self.whole,
            ignored_events=ledger.ignored_events,
            resident_blocks=ledger.resident_blocks,
            orphans=ledger.orphans,
            block_tokens=ledger.block_tokens,
        )

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
                self.status.state = "lost"
                log.info("kv_events_lost", backend=self.status.backend, rank=self.status.rank)

    def _now_connected(self, held: tuple[int, bytes] | None) -> None:
        self._connected = True
        self._held = held
        log.info("kv_events_connected", backend=self.status.backend, rank=self.status.rank)
        if self._can_replay():
            self._ask()
            return
        self._unsure = self._continuity.expected is not None
        self.status.state = "live"
        self._settle()

    # Live messages.

    def _receive(self) -> None:
        self._observe()  # a new connection is to be known before what comes over it
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
                continue  # a subscription is to all topics that begin alike
            if self._connected:
                self._live(sequence, payload)
            elif self._continuity.place(sequence) is MessagePlace.NEXT:  # it came before the connection was lost
                self._take(sequence, payload)
            else:  # it overtook the news of its connection
                self._now_connected((sequence, payload))

    def _live(self, sequence: int, payload: bytes) -> None:
        place = self._continuity.place(sequence)
        if place is MessagePlace.NEXT:
            self._unsure = False
            self._take(sequence, payload)
        elif place is MessagePlace.RESTARTED or self._unsure:
            self._begin_anew((sequence, payload), proven=place is MessagePlace.RESTARTED)
        elif place is MessagePlace.AFTER_GAP:
            self.status.gaps += self._continuity.expected is not None
            self._held = sequence, payload
            if self._can_replay():
                self._ask()
            else:
                self._settle()

    def _settle(self) -> None:
        """Go on with the message that was held, if there is one; what is still missing before it is lost."""
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
        self.status.whole = whole and sequence == 0
        self._continuity.begin(sequence)
        self._take(sequence, payload)

    def _begin_anew(self, held: tuple[int, bytes] | None, *, proven: bool) -> None:
        """Another process publishes, with another cache; or that cannot be ruled out."""
        self._forget_process()
        if proven:
            self.status.restarts += 1
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
            self.status.state = "live"
            self._settle()

    def _forget_process(self) -> None:
        self.ledger.forget()
        self._continuity.reset()
        self._unsure = self.status.whole = False

    def _drop_view(self) -> None:
        self.ledger.drop()
        self._lost_view()

    def _lost_view(self) -> None:
        self.status.whole = False
        self.status.lost_views += 1
        log.warning("kv_events_missed", backend=self.status.backend, rank=self.status.rank)

    def _take(self, sequence: int, payload: bytes) -> None:
        self._continuity.took(sequence, payload)
        self.status.messages += 1
        self.status.last_event_at = self._clock()
        try:
            batch = read_batch(payload, self._turn.breathe)
        except ValueError as error:
            self._complain(error)
            self._drop_view()  # what it told is not known
            return
        self.status.events += len(batch.events)
        apply, breathe, overflows = self.ledger.apply, self._turn.breathe, self.ledger.overflows
        for event in batch.events:
            apply(event)
            breathe()
            if isinstance(event, Cleared):
                self.status.whole = True  # nothing is cached that is not known
        if self.ledger.overflows != overflows:
            self._lost_view()
        if not self.status.whole and self.ledger.fullness > FULL:
            self.status.whole = True  # there is no room for blocks that are not known

    # Missed messages.

    def _can_replay(self) -> bool:
        return self.source.replay is not None and self._clock() >= self._replay_rests_until

    def _ask(self) -> None:
        """Ask for what follows the last message that was used, and for that one too, as a proof."""
        assert self.source.replay is not None
        self._end_replay()
        proving = self._continuity.can_prove
        start = (self._continuity.expected or 0) - proving
        deadline = self._clock() + REPLAY_PATIENCE_SECONDS
        self._replay = Replay(self._context, self.source.replay, start, deadline, proving=proving)
        self._turn.hear(self._replay.socket, self._receive_replay)
        if self._subscription is not None:
            self._turn.ignore(self._subscription)  # live messages wait
        self.status.state = "repairing"

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
        for sequence, payload in replay.messages():
            replay.deadline = self._clock() + REPLAY_PAUSE_SECONDS
            self._replayed(replay, sequence, payload)
            replay.received += 1
            if self._replay is not replay or not self._turn.may_go_on():
                return
        if replay.ended:
            self._replay_ended(replay)

    def _replayed(self, replay: Replay, sequence: int, payload: bytes) -> None:
        expected = self._continuity.expected
        if replay.proving:
            replay.proving = False
            if not self._continuity.proves(sequence, payload):
                self._begin_anew(self._held, proven=expected is not None and sequence < expected)
        elif expected is not None and sequence > expected and replay.received:
            replay.torn = True
        elif expected is None or sequence >= expected:
            replay.used += 1
            if expected is None:
                self._begin_with(sequence, payload)
            elif sequence == expected:
                self._take(sequence, payload)
            else:  # the buffer does not reach back as far
                self._drop_view()
                self._begin_with(sequence, payload, whole=False)

    def _replay_ended(self, replay: Replay) -> None:
        if replay.proving:  # not even the message that was used is there
            self._begin_anew(self._held, proven=True)
        elif replay.torn:
            self._ask()
        else:
            if self._continuity.expected is None:  # nothing was ever published
                self._continuity.begin(0)
                self.status.whole = True
            self._unsure = False
            self.status.repairs += 1
            self._end_replay()
            self.status.state = "live"
            self._settle()

    def _replay_failed(self) -> None:
        log.warning("kv_events_replay_failed", backend=self.status.backend, endpoint=self.source.replay)
        self._replay_rests_until = self._clock() + REPLAY_REST_SECONDS
        self._unsure = self._replay is not None and self._replay.proving
        self._end_replay()
        self.status.state = "live"
        self._settle()

    def _complain(self, error: ValueError) -> None:
        """Count it, and log each reason once."""
        self.status.malformed += 1
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("kv_events_malformed", backend=self.status.backend, reason=self._complaint)
