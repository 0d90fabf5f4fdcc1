"""vLLM's KV event messages: events out of frames, the order of messages, replays of missed ones, and their sockets.

A message is `[topic, sequence, payload]`; the payload is a MessagePack array of time, events, and the data-parallel
rank. From vLLM 0.24 on an event is a map with a key `type`; before, it was an array that begins with its type. Unknown
fields and unknown types of event are ignored, so that newer engines are still supported.

Decoding holds the interpreter, so no single call of the decoder gets more than a part of a message whose cost is
bounded: sizes are looked at before, events are decoded one by one, and what may be nested at will is left raw.

vLLM numbers its messages from 0 in each process. It answers a request for missed messages from a buffer of its last
ones, then sends an end marker. Its socket silently drops what a slow receiver cannot take, so an answer can have holes,
or no end; it is then requested again from there. Each request has a connection of its own, so that a late answer is
never mistaken for the answer to the next. Missed messages arrive a second time as live ones, which is no restart: a
restart is a live number that is not above the live number before it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
import zmq
from xxhash import xxh3_64_intdigest

MAX_PAYLOAD_BYTES = 2 * 1024 * 1024  # a step of vLLM with 131,072 tokens is 1 MiB
MAX_EVENTS = 65536  # of a message
MAX_FIELDS = 64  # of an event; vLLM's have at most 12
MAX_EXTRA_KEYS_BYTES = 131072  # of an event; events with more are ignored
MAX_EXTRA_KEY_BYTES = 1024  # of a block; likewise
MAX_HASH_BYTES = 64  # vLLM's are 32
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
RECEIVE_QUEUE_MESSAGES = 512  # beyond it live messages wait at the publisher; replayed ones may be dropped
REPLAY_PATIENCE_SECONDS = 3.0  # until the first replayed message; vLLM looks for requests ten times a second
PAUSE_SECONDS = 1.0  # until the next one, or the end marker
HANDLER_SECONDS = 0.01  # of one handler before the others run
SLICE_SECONDS = 0.0005  # between pauses
BREATH_SECONDS = 0.0001

_SOCKET_OPTIONS = (  # a bounded number of messages of bounded size
    (zmq.LINGER, 0),
    (zmq.IPV6, 1),
    (zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES),
    (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 5000),
    (zmq.HEARTBEAT_IVL, 5000),  # a machine that is gone closes no connection
    (zmq.HEARTBEAT_TIMEOUT, 15000),
)

# The low 64 bits, or the whole of it, by VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES.
BlockHash = int | Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BYTES)]
BlockTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]  # 0: a connector does not know
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Stored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False):
    """Blocks that follow one another in a prompt are cached now. `parent_block_hash` None = they begin the prompt."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: BlockTokens
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None  # one entry a block: LoRA name, [media id, offset], salt, embeddings digest
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    """Blocks were evicted. An engine may hold several copies of a block, and says so of each."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    """The whole prefix cache was reset."""


Event = Stored | Removed | Cleared
_NOTHING = msgspec.Raw(b"\xc0")


class _RawStored(Stored, tag="BlockStored", frozen=True):
    extra_keys: msgspec.Raw = _NOTHING


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float  # Unix time
    events: msgspec.Raw


class _Typed(msgspec.Struct, frozen=True):
    type: str


_BATCH = msgspec.msgpack.Decoder(_Batch)
_RAWS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENT = msgspec.msgpack.Decoder(_RawStored | Removed | Cleared)
_TYPED = msgspec.msgpack.Decoder(_Typed)
_TEXT = msgspec.msgpack.Decoder(str)
_ANY = msgspec.msgpack.Decoder()
_FIELDS = {str(each.__struct_config__.tag): ("type", *each.__struct_fields__) for each in (Stored, Removed, Cleared)}
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def read_frames(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Topic, sequence number and payload. Like `read_events`, it raises ValueError and nothing else."""
    if len(frames) != 3:
        raise ValueError(f"a message has {len(frames)} frames")
    topic, sequence, payload = frames
    if len(sequence) != SEQUENCE_BYTES:
        raise ValueError("a sequence number is not 8 bytes long")
    return topic, int.from_bytes(sequence, "big"), payload


def read_events(payload: bytes, breathe: Callable[[], None] = lambda: None) -> list[Event]:
    """The events of one engine step, in order, in either encoding. `breathe` is called between them."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError("a payload is too large")
    try:
        batch = _BATCH.decode(payload)
        if _length(batch.events) > MAX_EVENTS:
            raise ValueError("a payload has too many events")
        events = []
        for raw in _RAWS.decode(batch.events):
            if (event := _read_event(raw)) is not None:
                events.append(event)
            breathe()
    except _MALFORMED as error:
        raise ValueError(f"a payload is malformed: {error}") from error
    return events


def _length(array: msgspec.Raw) -> int:
    """Elements of an array, by its header; 0 for anything else, which the decoder refuses."""
    header = bytes(memoryview(array)[:5])
    if header[:1] in (b"\xdc", b"\xdd"):
        return int.from_bytes(header[1:3] if header[0] == 0xDC else header[1:5], "big")
    return header[0] & 0x0F if 0x90 <= header[0] <= 0x9F else 0


def _as_map(row: msgspec.Raw) -> msgspec.Raw:
    """An event of a vLLM before 0.24 as later ones send it."""
    values = _RAWS.decode(row)
    names = _FIELDS.get(_TEXT.decode(values[0]), ("type",))
    return msgspec.Raw(msgspec.msgpack.encode(dict(zip(names, values, strict=False))))


def _read_event(raw: msgspec.Raw) -> Event | None:
    """None = of a type that is not known here, or with extra keys that are too long: clients choose the cache salt."""
    if 0 < _length(raw) <= MAX_FIELDS:
        raw = _as_map(raw)
    try:
        event: Event = _EVENT.decode(raw)
    except msgspec.ValidationError:
        if _TYPED.decode(raw).type in _FIELDS:
            raise
        return None
    if not isinstance(event, _RawStored):
        return event
    if len(memoryview(event.extra_keys)) > MAX_EXTRA_KEYS_BYTES:
        return None
    entries = _RAWS.decode(event.extra_keys) if event.extra_keys != _NOTHING else None
    if entries and any(len(memoryview(entry)) > MAX_EXTRA_KEY_BYTES for entry in entries):
        return None
    return msgspec.structs.replace(event, extra_keys=entries and [_ANY.decode(entry) for entry in entries])


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


class Sockets:
    """Calls a handler when its socket can be read.

    A handler lets other threads run every half millisecond: Python's own switch interval would block the event loop
    ten times as long.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.context: Context = zmq.Context()
        for option, value in _SOCKET_OPTIONS:
            self.context.setsockopt(option, value)  # of each of its sockets
        self.clock = clock
        self._sleep = sleep
        self._poller = zmq.Poller()
        self._handlers: dict[Socket, Callable[[], object]] = {}
        self._turn_ends = self._breathed = 0.0
        self._waker, self._wakeup = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        self._wakeup.bind("inproc://wakeup")
        self._waker.connect("inproc://wakeup")
        self.hear(self._wakeup, self._wakeup.recv)

    def wake(self) -> None:
        """End the wait in `ready`; called in another thread."""
        with suppress(zmq.Again):  # it has been woken already
            self._waker.send(b"", zmq.NOBLOCK)

    def hear(self, socket: Socket, handle: Callable[[], object]) -> None:
        """Call `handle` whenever something can be received."""
        self._handlers[socket] = handle
        self._poller.register(socket, zmq.POLLIN)

    def ignore(self, socket: Socket) -> None:
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def ready(self, within_seconds: float) -> Iterator[Callable[[], object]]:
        """Handlers of the sockets that can be read; one may `ignore` the socket of another."""
        for socket, _ in self._poller.poll(int(within_seconds * 1000)):
            if handle := self._handlers.get(socket):
                yield handle

    def begin_turn(self) -> None:
        self._breathed = self.clock()
        self._turn_ends = self._breathed + HANDLER_SECONDS

    def may_go_on(self) -> bool:
        """False = the handler's time is used up; it is called again soon."""
        return self.clock() < self._turn_ends

    def breathe(self) -> None:
        """Let other threads run for a moment, if it is time."""
        if self.clock() - self._breathed > SLICE_SECONDS:
            self._sleep(BREATH_SECONDS)
            self._breathed = self.clock()


class Replay:
    """One request for the messages from `expected` on, sent on creation, and its answer. The owner closes it."""

    def __init__(self, sockets: Sockets, endpoint: str, expected: int) -> None:
        self.proving = expected > 0  # the first message is the last one that was used, again, as a proof
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
