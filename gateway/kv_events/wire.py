"""vLLM's KV event messages: frames in, events out. Pure; whatever is malformed raises ValueError and nothing else.

A message is `[topic, sequence, payload]`; the payload is a MessagePack array of time, events, and the data-parallel
rank. From vLLM 0.24 on an event is a map with a key `type`, before it was an array that begins with its type. Unknown
fields and unknown types of event are passed over, so that a newer engine is still understood.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

BlockHash = int | bytes  # the low 64 bits, or the whole of it, by VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
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


class _StoredRow(Stored, tag="BlockStored", frozen=True, array_like=True):
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


class _RowBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Typed(msgspec.Struct, frozen=True):
    type: str


_BATCH = msgspec.msgpack.Decoder(Batch)
_ROW_BATCH = msgspec.msgpack.Decoder(_RowBatch)
_RAW_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_EVENT = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_TYPE = msgspec.msgpack.Decoder(_Typed)
_ANY_ROW = msgspec.msgpack.Decoder(list[Any])
_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def read_frames(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Topic, sequence number and payload of a message."""
    if len(frames) != 3:
        raise ValueError(f"a message has {len(frames)} frames")
    topic, sequence, payload = frames
    if len(sequence) != SEQUENCE_BYTES:
        raise ValueError("a sequence number is not 8 bytes long")
    return topic, int.from_bytes(sequence, "big"), payload


def read_batch(payload: bytes) -> Batch:
    """The events of a payload, in either encoding."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError("a payload is too large")
    try:
        return _BATCH.decode(payload)
    except _MALFORMED:
        pass
    try:
        rows = _ROW_BATCH.decode(payload)
        return Batch(rows.ts, list(rows.events), rows.data_parallel_rank)
    except _MALFORMED:
        pass
    return _read_each(payload)


def _read_each(payload: bytes) -> Batch:
    """The slow way, for payloads with events of unknown type."""
    try:
        batch = _RAW_BATCH.decode(payload)
        events = [event for raw in batch.events if (event := _read_event(raw)) is not None]
    except _MALFORMED as error:
        raise ValueError(f"a payload is malformed: {error}") from error
    return Batch(batch.ts, events, batch.data_parallel_rank)


def _read_event(raw: msgspec.Raw) -> Event | None:
    """None = an event of a type that this version does not know."""
    first = bytes(raw)[:1]
    is_row = first in (b"\xdc", b"\xdd") or 0x90 <= first[0] <= 0x9F
    if is_row:
        row = _ANY_ROW.decode(raw)
        if not row or not isinstance(row[0], str):
            raise ValueError("an event has no type")
        return _ROW.decode(raw) if row[0] in _KNOWN else None
    return _EVENT.decode(raw) if _TYPE.decode(raw).type in _KNOWN else None
