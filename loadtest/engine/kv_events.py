"""KV events as vLLM encodes them, one msgpack batch a step, and its rules for endpoints, ports and ranks."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

import msgspec
import zmq

BlockHash: TypeAlias = int | bytes

MEDIUM: Final = "GPU"
# Of the only group of layers that a model with full attention has.
GROUP: Final = 0
SPEC_KIND: Final = "full_attention"


class Encoding(StrEnum):
    """How an event is laid out: by field names, or by position as vLLM did until the middle of 2026."""

    MAP = "map"
    ARRAY = "array"


class HashFormat(StrEnum):
    """How a block's hash is published: its low 64 bits, or all its bytes."""

    INT = "int"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """vLLM's --kv-events-config, and the form of its events. The ports are those of rank 0."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    _: KW_ONLY
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    encoding: Encoding = Encoding.MAP
    hashes: HashFormat = HashFormat.INT


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Something that happened to the prefix cache. The order of the fields is that of the wire."""


class BlockStored(Event):
    """Blocks that follow each other can be found from now on. `extra_keys` has one entry a block."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(Event):
    """One copy of each block is gone."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    """The cache was reset."""


# The fields that the last vLLM with positional events had, all of them always present.
_POSITIONS: Final = {
    BlockStored: BlockStored.__struct_fields__[:11],
    BlockRemoved: BlockRemoved.__struct_fields__[:3],
    AllBlocksCleared: (),
}


def encoder(encoding: Encoding) -> Callable[[float, Sequence[Event], int], bytes]:
    """Encodes a batch of that wall-clock time, with those events, of that data-parallel rank."""
    encode = msgspec.msgpack.Encoder().encode

    def by_name(unix_seconds: float, events: Sequence[Event], rank: int) -> bytes:
        return encode((unix_seconds, events, rank))

    def by_position(unix_seconds: float, events: Sequence[Event], rank: int) -> bytes:
        return encode((unix_seconds, [_positional(event) for event in events], rank))

    return by_name if encoding is Encoding.MAP else by_position


def _positional(event: Event) -> list[Any]:
    kind = type(event)
    return [kind.__name__, *(getattr(event, field) for field in _POSITIONS[kind])]


_ANY_PORT = "tcp://*:0"


@dataclass(frozen=True, slots=True)
class Address:
    """One socket's address: as it is published, and as it is bound or connected to."""

    advertised: str
    target: str
    binds: bool

    def attach(self, socket: "zmq.Socket[Any]") -> "Address":
        """Bind or connect; the address with the port that the system chose, if it was to choose one."""
        if not self.binds:
            socket.connect(self.target)
            return self
        if "::" in self.target:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(self.target)
        if self.advertised != _ANY_PORT:
            return self
        chosen: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return replace(self, advertised=chosen, target=chosen)


def publish_address(endpoint: str, rank: int, host: str) -> Address:
    """Where a rank publishes: it binds wildcards, and connects to anything else."""
    address = replay_address(endpoint, rank, host)
    local = endpoint.startswith(("ipc://", "inproc://"))
    return replace(address, binds="*" in endpoint or "::" in endpoint or local)


def replay_address(endpoint: str, rank: int, host: str) -> Address:
    """Where a rank replays: it always binds."""
    address = of_rank(endpoint, rank)
    return Address(address, f"tcp://{host}:0" if address == _ANY_PORT else address, binds=True)


def of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: its number is added to the port, unless the system chooses that."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp://"):
        raise ValueError(f"data-parallel ranks need a tcp or inproc endpoint, not {endpoint}")
    before, _, port = endpoint.rpartition(":")
    return endpoint if int(port) == 0 else f"{before}:{int(port) + rank}"
