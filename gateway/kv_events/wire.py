"""vLLM's KV event messages: frames in, events out. Pure; malformed messages raise ValueError and nothing else.

A message is `[topic, sequence, payload]`; the payload is a MessagePack array of time, events, and the data-parallel
rank. From vLLM 0.24 on an event is a map with a key `type`; before, it was an array that begins with its type. Unknown
fields and unknown types of event are ignored, so that newer engines are still supported.

Decoding holds the interpreter, so no single call of the decoder gets more than a part of a message whose cost is
bounded: sizes are looked at before, events are decoded one by one, and what may be nested at will is left raw.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

MAX_PAYLOAD_BYTES = 2 * 1024 * 1024  # a step of vLLM with 131,072 tokens is 1 MiB
MAX_EVENTS = 65536  # of a message
MAX_EXTRA_KEYS_BYTES = 131072  # of an event; events with more are ignored
MAX_EXTRA_KEY_BYTES = 1024  # of a block; likewise
MAX_HASH_BYTES = 64  # vLLM's are 32
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

_NOTHING = msgspec.Raw(b"\xc0")

# The low 64 bits, or the whole of it, by VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES.
BlockHash = int | Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BYTES)]
BlockTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]  # 0: a connector does not know


class Stored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False):
    """Blocks that follow one another in a prompt are cached now. `parent_block_hash` None = they begin the prompt."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: BlockTokens
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None  # one entry a block: LoRA name, [media id, offset], salt, embeddings digest
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False):
    """Blocks were evicted. An engine may hold several copies of a block, and says so of each."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    """The whole prefix cache was reset."""


class _StoredMap(msgspec.Struct, tag="BlockStored", frozen=True):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: BlockTokens
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NOTHING
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _StoredRow(_StoredMap, tag="BlockStored", frozen=True, array_like=True):
    pass


class _RemovedRow(Removed, tag="BlockRemoved", frozen=True, array_like=True):
    pass


class _ClearedRow(Cleared, tag="AllBlocksCleared", frozen=True, array_like=True):
    pass


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one engine step, in order."""

    ts: float  # Unix time
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: int | None = None


class _Typed(msgspec.Struct, frozen=True):
    type: str


class _TypedRow(msgspec.Struct, frozen=True, array_like=True):
    type: str


_RAW_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_RAWS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_EVENT = msgspec.msgpack.Decoder(_StoredMap | Removed | Cleared)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_TYPE = msgspec.msgpack.Decoder(_Typed)
_ROW_TYPE = msgspec.msgpack.Decoder(_TypedRow)
_ANY = msgspec.msgpack.Decoder()
_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def read_frames(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    if len(frames) != 3:
        raise ValueError(f"a message has {len(frames)} frames")
    topic, sequence, payload = frames
    if len(sequence) != SEQUENCE_BYTES:
        raise ValueError("a sequence number is not 8 bytes long")
    return topic, int.from_bytes(sequence, "big"), payload


def read_batch(payload: bytes, breathe: Callable[[], None] = lambda: None) -> Batch:
    """The events of a payload, in either encoding. `breathe` is called between them."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError("a payload is too large")
    try:
        batch = _RAW_BATCH.decode(payload)
        if _length(batch.events) > MAX_EVENTS:
            raise ValueError("a payload has too many events")
        events = []
        for raw in _RAWS.decode(batch.events):
            if (event := _read_event(raw)) is not None:
                events.append(event)
            breathe()
    except _MALFORMED as error:
        raise ValueError(f"a payload is malformed: {error}") from error
    return Batch(batch.ts, events, batch.data_parallel_rank)


def _length(array: msgspec.Raw) -> int:
    """Elements of an array, by its header; 0 for anything else, which the decoder refuses."""
    header = bytes(memoryview(array)[:5])
    if header[:1] in (b"\xdc", b"\xdd"):
        return int.from_bytes(header[1:3] if header[0] == 0xDC else header[1:5], "big")
    return header[0] & 0x0F if 0x90 <= header[0] <= 0x9F else 0


def _read_event(raw: msgspec.Raw) -> Event | None:
    """None = an event of a type that this version does not know."""
    first = memoryview(raw)[0]
    is_row = first in (0xDC, 0xDD) or 0x90 <= first <= 0x9F
    try:
        event = _ROW.decode(raw) if is_row else _EVENT.decode(raw)
    except msgspec.ValidationError:
        if (_ROW_TYPE.decode(raw) if is_row else _TYPE.decode(raw)).type in _KNOWN:
            raise
        return None
    return _stored(event) if isinstance(event, _StoredMap) else event


def _stored(event: _StoredMap) -> Stored | None:
    """None = its extra keys are too long. A client chooses the cache salt, so that is no fault of the engine."""
    try:
        extra_keys = _extra_keys(event.extra_keys)
    except OverflowError:
        return None
    return Stored(
        event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_id, event.medium,
        event.lora_name, extra_keys, event.group_idx, event.kv_cache_spec_kind,
    )  # fmt: skip


def _extra_keys(raw: msgspec.Raw) -> list[Any] | None:
    if raw == _NOTHING:
        return None
    if len(memoryview(raw)) > MAX_EXTRA_KEYS_BYTES:
        raise OverflowError
    entries = _RAWS.decode(raw)
    if any(len(memoryview(entry)) > MAX_EXTRA_KEY_BYTES for entry in entries):
        raise OverflowError
    return [_ANY.decode(entry) for entry in entries]
