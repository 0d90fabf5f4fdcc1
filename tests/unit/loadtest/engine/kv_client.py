"""A client of KV events over real sockets, and what it believes to be cached. It reads the wire by itself."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from loadtest.engine.kv_event_publisher import KvEventPublisher

DEADLINE_SECONDS = 5.0
END_SEQ = -1
# A key that no block has: its removal marks a batch without meaning anything.
MARKER_KEY = 0
POSITIONS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass
class Batch:
    """One message: its number, when, of which rank, and its events as mappings without what is null."""

    topic: str
    seq: int
    unix_seconds: float
    events: list[dict[str, Any]]
    rank: int


def read_batch(frames: list[bytes]) -> Batch:
    """A message as the publisher sends it."""
    topic, seq, payload = frames
    assert len(seq) == 8
    unix_seconds, events, rank = msgspec.msgpack.decode(payload)
    return Batch(topic.decode(), int.from_bytes(seq, "big"), unix_seconds, [_named(event) for event in events], rank)


def _named(event: Any) -> dict[str, Any]:
    if isinstance(event, list):
        event = {"type": event[0], **dict(zip(POSITIONS[event[0]], event[1:], strict=True))}
    return {name: value for name, value in event.items() if value is not None}


@dataclass
class Mirror:
    """What a subscriber believes to be cached: each hash with the number of its copies."""

    copies: Counter[int | bytes] = field(default_factory=Counter)

    def apply(self, batch: Batch) -> None:
        """Follow one batch."""
        for event in batch.events:
            if event["type"] == "AllBlocksCleared":
                self.copies.clear()
            elif event["type"] == "BlockStored":
                self.copies.update(event["block_hashes"])
            else:
                known = [block for block in event["block_hashes"] if low_bits(block) != MARKER_KEY]
                self.copies.subtract(known)
                assert all(self.copies[block] >= 0 for block in known), "more copies removed than stored"
                self.copies += Counter()


class KvClient:
    """A SUB socket, and a DEALER for replays."""

    def __init__(self, context: zmq.asyncio.Context, publisher: KvEventPublisher, topic: str) -> None:
        self.publisher = publisher
        source = publisher.source()
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe(topic.encode())
        self._sub.connect(source["endpoint"])
        self._dealer: zmq.asyncio.Socket | None = None
        if source["replay_endpoint"]:
            self._dealer = context.socket(zmq.DEALER)
            self._dealer.connect(source["replay_endpoint"])

    async def joined(self) -> "KvClient":
        """Publish markers until one arrives: from then on nothing is missed."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                self.mark()
                if await self._sub.poll(10):
                    break
        await self.until_marker()
        return self

    def mark(self) -> None:
        """Publish a batch that says nothing."""
        self.publisher.log.on_removed(MARKER_KEY)
        self.publisher.flush()

    async def next(self) -> Batch:
        """The next message, markers included."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            return read_batch(await self._sub.recv_multipart())

    async def until_marker(self) -> list[Batch]:
        """All messages that were sent before now, without markers."""
        self.mark()
        last = self.publisher.next_seq - 1
        batches: list[Batch] = []
        while True:
            batch = await self.next()
            if not is_marker(batch):
                batches.append(batch)
            if batch.seq >= last:
                return batches

    async def replay(self, start: int) -> list[Batch]:
        """What the publisher still has from that number on, markers included."""
        assert self._dealer is not None
        await self._dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[Batch] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                empty, *frames = await self._dealer.recv_multipart()
                assert empty == b""
                if int.from_bytes(frames[1], "big", signed=True) == END_SEQ:
                    assert frames[0] == frames[2] == b""
                    return batches
                batches.append(read_batch(frames))


def is_marker(batch: Batch) -> bool:
    """Whether a batch is one of this client's own."""
    return [[low_bits(block) for block in event.get("block_hashes", ())] for event in batch.events] == [[MARKER_KEY]]


def low_bits(block_hash: int | bytes) -> int:
    """The hash as the engine's key."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


@contextmanager
def kv_client(publisher: KvEventPublisher, topic: str = "") -> Iterator[KvClient]:
    """A client whose sockets end with the block."""
    context = zmq.asyncio.Context()
    try:
        yield KvClient(context, publisher, topic)
    finally:
        context.destroy(linger=0)
