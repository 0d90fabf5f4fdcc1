"""`python -m tests.fault.other_version first|later serve …`: the gateway as another version, by its records.

`first`: as released before records had versions or bounds. `later`: of another version, with fields of other types.
"""

import sys
from typing import Any

import msgspec

from gateway.features.coordination import records, replica
from gateway.features.coordination.records import EngineUse, ReplicaRecord


class FirstEngine(msgspec.Struct, array_like=True, frozen=True):
    block: EngineUse
    wanted: EngineUse
    need: EngineUse
    whole: EngineUse


class FirstRecord(msgspec.Struct, array_like=True, frozen=True):
    number: int
    shown: str
    age_seconds: float
    shares: dict[str, FirstEngine]


def be_the_first() -> None:
    def read(_: str, data: bytes) -> ReplicaRecord:
        return msgspec.convert(msgspec.to_builtins(msgspec.msgpack.decode(data, type=FirstRecord)), ReplicaRecord)

    def write(record: ReplicaRecord) -> bytes:
        return msgspec.msgpack.encode(msgspec.to_builtins(record)[:4])

    replica.read_record, replica.write_record = read, write  # type: ignore[assignment]


def be_later() -> None:
    later: Any = records.VERSION + 1

    def write(record: ReplicaRecord) -> bytes:
        number, shown, age, shares, version, known = msgspec.to_builtins(record)
        if version == later:
            age, shares = {"first": age}, {key: [share[0], {"slots": share[1][0]}] for key, share in shares.items()}
        return msgspec.msgpack.encode([number, shown, age, shares, version, known, "more"])

    records.VERSION = replica.VERSION = later  # type: ignore[misc]
    replica.write_record = write


if __name__ == "__main__":
    {"first": be_the_first, "later": be_later}[sys.argv.pop(1)]()
    from gateway.__main__ import main

    main()
