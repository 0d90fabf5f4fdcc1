"""vLLM's KV events: their sockets, their decoding, and the resulting blocks of an engine.

A message is `[topic, sequence, payload]`; the payload is a MessagePack array of time, events, and the data-parallel
rank. From vLLM 0.24 on an event is a map with a key `type`; before, it was an array that begins with its type. Unknown
fields and unknown types of event are ignored, so that newer engines are still supported.

Decoding holds the interpreter, so each call of the decoder gets a part of a message with bounded cost: sizes are
checked before, events are decoded one by one, and fields with arbitrary nesting are left raw.

An engine names its blocks by hashes that only it can compute. `Ledger` matches each with a key of `index.token_keys`,
chained from the parent's key, so that a prompt tokenized here finds it. A block with an unknown parent (its event was
never received) is kept as an orphan: it counts, but has no key.

Only blocks in GPU memory count; a connector's copies elsewhere do not. For a model with several groups of layers, only
the first group with full attention is used: the others keep a window or a state, which proves no prefix.

vLLM keeps several copies of a block that it computed twice, and reports each copy stored and each one removed: the
block is gone with its last copy. It also reports reused blocks again if a request asks for it (`kv_cache_report_mode`):
a prompt of several blocks that are all held is such a report, because for a held prompt the engine computes at most the
last block. A count that grows beyond the cache cannot be right, so from then on one removal ends a block.

Blocks are spread over many small dicts: growing a large one would hold the interpreter for milliseconds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import zmq
from xxhash import xxh3_64_intdigest

from gateway.features.exact.index import TOKEN_BYTES, packed, token_keys, token_seed

MAX_PAYLOAD_BYTES = 2 * 1024 * 1024  # a step of vLLM with 131,072 tokens is 1 MiB
MAX_EVENTS = 65536  # of a message
MAX_FIELDS = 64  # of an event; vLLM's have at most 12
MAX_EXTRA_KEYS_BYTES = 131072  # of an event; events with more are ignored
MAX_EXTRA_KEY_BYTES = 1024  # of a block; likewise
MAX_HASH_BYTES = 64  # vLLM's are 32
SEQUENCE_BYTES = 8
RECEIVE_QUEUE_MESSAGES = 512  # beyond it live messages wait at the publisher; replayed ones may be dropped
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
    """Consecutive blocks of a prompt are cached now. `parent_block_hash` None = they begin the prompt."""

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


def _read_event(raw: msgspec.Raw) -> Event | None:
    """None = of a type that is not known here, or with extra keys that are too long: clients choose the cache salt."""
    if 0 < _length(raw) <= MAX_FIELDS:  # of a vLLM before 0.24: as later ones send it
        values = _RAWS.decode(raw)
        names = _FIELDS.get(_TEXT.decode(values[0]), ("type",))
        raw = msgspec.Raw(msgspec.msgpack.encode(dict(zip(names, values, strict=False))))
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


FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # None: not reported
GPU = frozenset({None, "GPU"})
SHARDS = 64  # a power of two
MAX_BLOCKS = (512 << 20) // 256  # memory for one engine; a block takes 256 bytes, in the routing index too; measured
MAX_COPIED_BLOCKS = 1 << 18  # with more of them, counting of copies stops


class Ledger:
    """One engine's blocks. Changes are collected until they are taken."""

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_tokens = 0  # 0 = not known yet
        self.resident_blocks = 0
        self.orphans = 0
        self.ignored_events = 0
        self.overflows = 0  # resets because no cache can hold the reported blocks
        self._group: int | None = None
        self._counts_copies = True
        self._copies = 0  # of all blocks
        self._keys: list[dict[BlockHash, int | None]] = [{} for _ in range(SHARDS)]  # None = an orphan
        self._more_copies: dict[BlockHash, int] = {}  # only of blocks with more than one
        self._hashes: list[dict[int, int]] = [{} for _ in range(SHARDS)]  # key -> how many hashes have it
        self._cleared = False
        self._blocks_taken = 0
        self._changes: dict[int, bool] = {}  # key -> whether it is held now
        self._dropped: list[dict[int, int]] = []  # with keys that are removed before the changes

    def resize(self, capacity_tokens: int | None) -> None:
        """Follow another size of the engine's KV cache; None = unknown."""
        self.capacity_tokens = capacity_tokens

    @property
    def resident_tokens(self) -> int:
        """Prompt tokens that the blocks are good for; further copies of a block are not counted."""
        return self.resident_blocks * self.block_tokens

    @property
    def fullness(self) -> float:
        """Share of the engine's cache that is taken by blocks with keys; 0 if its size is not known."""
        if self.capacity_tokens is None or not self.block_tokens:
            return 0.0
        return (self._copies - self.orphans) * self.block_tokens / max(1, self.capacity_tokens)

    @property
    def pending(self) -> int:
        """Number of changes not taken yet; a change in the number of blocks without keys counts too."""
        return len(self._changes) + len(self._dropped) + self._cleared + (self.resident_blocks != self._blocks_taken)

    def update(self, event: Event) -> None:
        if isinstance(event, Stored):
            self.ignored_events += not self._stored(event)
        elif isinstance(event, Removed):
            self._removed(event)
        else:
            self.clear()

    def clear(self) -> None:
        self.drop()
        self._cleared = True

    def drop(self) -> None:
        """Forget all blocks, although the engine may still hold them."""
        self._changes = {key: False for key, held in self._changes.items() if not held}
        self._dropped += [hashes for hashes in self._hashes if hashes]
        self._hashes = [{} for _ in range(SHARDS)]
        for keys in self._keys:
            keys.clear()
        self._more_copies.clear()
        self.resident_blocks = self._copies = self.orphans = 0

    def forget(self) -> None:
        """Forget all blocks and the block size."""
        self.drop()
        self.block_tokens, self._group, self._counts_copies = 0, None, True

    def take(self) -> tuple[bool, list[int], list[int]]:
        """Changes since the last time: whether the cache is empty, or another process's; added keys; removed keys.

        A key both added and removed counts as removed. After `drop` there are only removed ones.
        """
        changes, self._changes = self._changes, {}
        dropped, self._dropped = self._dropped, []
        cleared, self._cleared = self._cleared, False
        self._blocks_taken = self.resident_blocks
        added = [key for key, held in changes.items() if held]
        removed = [key for hashes in dropped for key in hashes if key not in changes]
        removed += [key for key, held in changes.items() if not held]
        return cleared, added, removed

    def _stored(self, event: Stored) -> bool:
        """False = the event is ignored: it proves no prefix."""
        hashes, size, parent, shards = event.block_hashes, event.block_size, event.parent_block_hash, self._keys
        if event.medium not in GPU or event.kv_cache_spec_kind not in FULL_ATTENTION:
            return False
        if self._group is None:
            self._group = event.group_idx
        if event.group_idx != self._group or not size or len(event.token_ids) != len(hashes) * size:
            return False  # a window's or a state's blocks come with gaps
        if size < self.block_tokens:
            return False  # a part of a block: the largest blocks are the engine's
        if size > self.block_tokens > 0:
            self.clear()
        self.block_tokens = size
        if parent is None:
            chain: int | None = token_seed(event.lora_name, _salt(event))
        else:
            chain = shards[hash(parent) & SHARDS - 1].get(parent)
        try:
            keys = [None] * len(hashes) if chain is None else _chained(event, chain)
        except OverflowError:
            return False  # an invalid token id
        are_held = (block in shards[hash(block) & SHARDS - 1] for block in hashes)
        is_report = parent is None and len(hashes) > 1 and all(are_held)
        for block, key in zip(hashes, keys, strict=True):
            self._add(block, key, not is_report)
        if self._copies > self._capacity_blocks() or len(self._more_copies) > MAX_COPIED_BLOCKS:
            self._overflowed()
        return True

    def _add(self, block: BlockHash, key: int | None, is_copy: bool) -> None:
        keys = self._keys[hash(block) & SHARDS - 1]
        if block not in keys:
            keys[block] = key
            self.resident_blocks += 1
            self._copies += 1
        else:
            if is_copy and self._counts_copies:
                self._more_copies[block] = self._more_copies.get(block, 0) + 1
                self._copies += 1
            if key is None or keys[block] is not None:
                return
            keys[block] = key  # an orphan's prefix became known
            self.orphans -= 1
        if key is None:
            self.orphans += 1
            return
        hashes = self._hashes[key & SHARDS - 1]
        count = hashes[key] = hashes.get(key, 0) + 1
        if count == 1:
            self._changes[key] = True

    def _removed(self, event: Removed) -> None:
        if event.medium not in GPU or (event.group_idx is not None and event.group_idx != self._group):
            self.ignored_events += 1
            return
        for block in event.block_hashes:
            keys = self._keys[hash(block) & SHARDS - 1]
            if block not in keys:
                continue
            self._copies -= 1
            if more := self._more_copies.pop(block, 0):
                if more > 1:
                    self._more_copies[block] = more - 1
                continue
            self.resident_blocks -= 1
            key = keys.pop(block)
            if key is None:
                self.orphans -= 1
                continue
            hashes = self._hashes[key & SHARDS - 1]
            hashes[key] -= 1
            if not hashes[key]:
                del hashes[key]
                self._changes[key] = False

    def _capacity_blocks(self) -> int:
        if self.capacity_tokens is None or not self.block_tokens:
            return MAX_BLOCKS
        return min(MAX_BLOCKS, self.capacity_tokens // self.block_tokens + 1)

    def _overflowed(self) -> None:
        self._counts_copies = False
        self._more_copies.clear()
        self._copies = self.resident_blocks
        if self._copies > min(4 * self._capacity_blocks(), MAX_BLOCKS):
            self.overflows += 1
            self.drop()  # not this engine's size, or not its events


def _chained(event: Stored, chain: int) -> Iterable[int]:
    """Keys of the event's blocks; media and embeddings in a block change its key."""
    token_bytes, size = packed(event.token_ids), event.block_size
    extra = event.extra_keys
    if not extra or not any(extra):
        return token_keys(token_bytes, size, chain)
    if len(extra) != len(event.block_hashes):
        raise OverflowError("extra keys do not match the blocks")
    width, keys, salt = size * TOKEN_BYTES, [], _salt(event) if event.parent_block_hash is None else None
    for number, entry in enumerate(extra):
        [chain] = token_keys(token_bytes[number * width : (number + 1) * width], size, chain)
        mixed = _besides_adapter(event, entry)
        if number == 0 and salt is not None:
            mixed.remove(salt)
        if mixed:
            chain = xxh3_64_intdigest(repr(mixed).encode("utf-8", "surrogatepass"), chain)
        keys.append(chain)
    return keys


def _besides_adapter(event: Stored, entry: Any) -> list[Any]:
    """A block's extra keys without the name of the LoRA adapter, which begins the chain, as the salt does."""
    keys = list(entry) if isinstance(entry, list) else [] if entry is None else [entry]
    if event.lora_name and event.lora_name in keys:
        keys.remove(event.lora_name)
    return keys


def _salt(event: Stored) -> str | None:
    """The cache salt: the last text among the first block's extra keys."""
    first = _besides_adapter(event, event.extra_keys[0]) if event.extra_keys else []
    return next((key for key in reversed(first) if isinstance(key, str)), None)
