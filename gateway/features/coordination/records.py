"""The records of the table: a replica's own, and validation of the records of others. Pure.

Anything may be in the table: another version of the gateway writes there, and so may any client of the server. A record
is used only within these bounds. Of another version's record, the first part is used: the number and the blocks, which
every version keeps in their places, so that no cap is exceeded while versions are mixed. New fields come at the end;
any other change of the format changes `VERSION`.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from gateway.core.routing.engine import EngineUse

VERSION: Final = 1
MOST_NAME_BYTES: Final = 64  # of a replica
MOST_KNOWN: Final = 64  # silent replicas that a record names
_MOST_BYTES: Final = 4 << 20  # of a record
_MOST_SECONDS: Final = 10 * 86_400.0
_MOST_AMOUNT: Final = 1 << 40  # of slots, or of tokens

Number = Annotated[int, Meta(ge=0)]
Run = Annotated[str, Meta(max_length=128)]
EngineKey = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=MOST_NAME_BYTES)]


class EngineBlock(msgspec.Struct, array_like=True, frozen=True):
    """One engine in the record of any version."""

    block: EngineUse

    def __post_init__(self) -> None:
        _check(self.block)


class EngineRecord(msgspec.Struct, array_like=True, frozen=True):
    """One engine in the record of a replica."""

    block: EngineUse
    wanted: EngineUse
    need: EngineUse
    whole: EngineUse

    def __post_init__(self) -> None:
        _check(self.block, self.wanted, self.need, self.whole)


class AnyRecord(msgspec.Struct, array_like=True, frozen=True):
    """The first part of a record in every version."""

    number: Number
    shown: Run
    age_seconds: msgspec.Raw
    shares: dict[EngineKey, EngineBlock]


class ReplicaRecord(msgspec.Struct, array_like=True, frozen=True):
    """A replica's record. `number` of the write; `shown`: the run in which it has shown its presence; `age_seconds`:
    the wait of its first request; `known`: silent replicas that it knows from before their silence."""

    number: Number
    shown: Run
    age_seconds: Annotated[float, Meta(ge=0.0, le=_MOST_SECONDS)]
    shares: dict[EngineKey, EngineRecord]
    version: int = VERSION
    known: Annotated[tuple[Name, ...], Meta(max_length=MOST_KNOWN)] = ()


Records = dict[str, ReplicaRecord]
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(ReplicaRecord).decode
_DECODE_ANY: Final = msgspec.msgpack.Decoder(AnyRecord).decode
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # errors of decoding
_NONE: Final = EngineUse(0, 0)


def write_record(record: ReplicaRecord) -> bytes:
    return _ENCODE(record)


def read_record(name: str, data: bytes) -> ReplicaRecord | None:
    """The record of a replica; None if it cannot be read. The wishes of another version are unknown."""
    if len(name) > MOST_NAME_BYTES or len(data) > _MOST_BYTES:
        return None
    try:
        record: ReplicaRecord = _DECODE(data)
        if record.version == VERSION:
            return record
    except UNREADABLE:
        pass
    try:
        known: AnyRecord = _DECODE_ANY(data)
    except UNREADABLE:
        return None
    shares = {key: EngineRecord(each.block, _NONE, _NONE, _NONE) for key, each in known.shares.items()}
    return ReplicaRecord(known.number, known.shown, 0.0, shares, version=0)


def unreadable(data: bytes) -> ReplicaRecord:
    """In the place of a record that cannot be read: its number changes with the bytes."""
    return ReplicaRecord(xxh3_64_intdigest(data), "", 0.0, {}, version=0)


def _check(*uses: EngineUse) -> None:
    for slots, kv_tokens in uses:
        if not (0 <= slots <= _MOST_AMOUNT and 0 <= kv_tokens <= _MOST_AMOUNT):
            raise ValueError("a part of an engine is out of bounds")
