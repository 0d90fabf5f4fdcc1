"""Publishes a rank's KV events: a log of the step's changes, a PUB socket, and a ROUTER socket for replay."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

import zmq
import zmq.asyncio

from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.kv_events import (
    GROUP,
    MEDIUM,
    SPEC_KIND,
    Address,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    HashFormat,
    KvEventsConfig,
    encoder,
)


def long_hash(key: int) -> bytes:
    """A hash of 32 bytes whose low 64 bits are the key."""
    low = key.to_bytes(8, "big")
    return sha256(low).digest()[:24] + low


class KvEventLog:
    """Observes a scheduler and its block pool."""

    def __init__(self, block_size: int, hashes: HashFormat) -> None:
        self._block_size = block_size
        self._hash: Callable[[int], BlockHash] = long_hash if hashes is HashFormat.BYTES else int
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def on_stored(self, sequence: SequenceState, first_block: int, parent_key: int | None, keys: Sequence[int]) -> None:
        """Blocks of a sequence can be found from now on."""
        content, size, as_published = sequence.content, self._block_size, self._hash
        assert content is not None, "a sequence with published blocks has their content"
        self._events.append(
            BlockStored(
                block_hashes=[as_published(key) for key in keys],
                parent_block_hash=None if parent_key is None else as_published(parent_key),
                token_ids=content.token_ids(first_block * size, (first_block + len(keys)) * size),
                block_size=size,
                lora_id=content.lora_id,
                medium=MEDIUM,
                lora_name=content.lora_name,
                extra_keys=content.extra_keys(first_block, len(keys)),
                group_idx=GROUP,
                kv_cache_spec_kind=SPEC_KIND,
                session_id=content.session_id,
            )
        )

    def on_removed(self, key: int) -> None:
        """One block with that key was overwritten."""
        self._events.append(BlockRemoved([self._hash(key)], MEDIUM, GROUP))

    def on_cleared(self) -> None:
        self._events.append(AllBlocksCleared())


_END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
# Between looks at the rest of the engine, while a replay is sent.
_REPLAY_SLICE: Final = 64


class KvEventPublisher:
    """Never waits for a reader: beyond the high-water marks ZeroMQ drops what it cannot send, of replays too."""

    def __init__(
        self,
        config: KvEventsConfig,
        rank: int,
        log: KvEventLog,
        *,
        unix_seconds: Callable[[], float],
        addresses: tuple[Address, Address | None],
    ) -> None:
        self.log = log
        self.addresses = addresses
        self._config = config
        self._rank = rank
        self._unix_seconds = unix_seconds
        self._encode = encoder(config.encoding)
        self._topic = config.topic.encode()
        self.next_seq = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._drops_left = 0
        self._held: deque[bytes] = deque(maxlen=config.max_queue_size)
        self._works = asyncio.Event()
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Bind or connect, and serve replays. ZMQError if an address is in use. Events wait until then."""
        published, replayed = self.addresses
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(self._config.hwm)
        published = published.attach(self._pub)
        if replayed is not None:
            self._router = zmq.asyncio.Socket(context, zmq.ROUTER)
            replayed = replayed.attach(self._router)
            self._replaying = asyncio.create_task(self._serve_replays(self._router))
        self.addresses = (published, replayed)
        self.hang(False)

    async def close(self) -> None:
        """Stop replaying, and close the sockets whatever they hold."""
        if self._replaying is not None:
            self._replaying.cancel()
            with suppress(asyncio.CancelledError):
                await self._replaying
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)

    def source(self) -> dict[str, Any]:
        """What /kv_event_sources reports of this rank."""
        published, replayed = self.addresses
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": published.advertised,
            "replay_endpoint": None if replayed is None else replayed.advertised,
            "buffer_steps": self._config.buffer_steps,
            "hwm": self._config.hwm,
            "max_queue_size": self._config.max_queue_size,
            "topic": self._config.topic,
        }

    def flush(self) -> None:
        """Publish what the log holds as one batch; nothing if it is empty."""
        events = self.log.take()
        if not events:
            return
        payload = self._encode(self._unix_seconds(), events, self._rank)
        if self._works.is_set():
            self._send(payload)
        else:
            self._held.append(payload)

    def drop_next(self, batches: int) -> None:
        """Number and keep that many batches from now on without sending them."""
        self._drops_left = batches

    def hang(self, hangs: bool) -> None:
        """Neither publish nor replay; what gathers meanwhile is sent when this ends."""
        if hangs:
            self._works.clear()
            return
        self._works.set()
        while self._held:
            self._send(self._held.popleft())

    def _send(self, payload: bytes) -> None:
        seq = self.next_seq
        self.next_seq += 1
        self._sent.append((seq, payload))
        if self._drops_left:
            self._drops_left -= 1
            return
        assert self._pub is not None, "the publisher is not open"
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        """Answer one request after another, as vLLM's publisher does; a malformed one is ignored."""
        while True:
            request = await router.recv_multipart()
            await self._works.wait()
            if len(request) == 3:
                client, _, start = request
                await self._replay(router, client, int.from_bytes(start, "big"))

    async def _replay(self, router: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        wanted = [(seq, payload) for seq, payload in self._sent if seq >= start]
        for number, (seq, payload) in enumerate(wanted, start=1):
            await router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
            if number % _REPLAY_SLICE == 0:
                await asyncio.sleep(0)
        await router.send_multipart((client, b"", b"", _END_OF_REPLAY, b""))


class KvEventPublishers:
    """The publishers of all data-parallel ranks, on one ZeroMQ context."""

    def __init__(self, publishers: Iterable[KvEventPublisher]) -> None:
        self.by_rank = list(publishers)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def open(self) -> None:
        """Bind or connect all sockets, or none: ZMQError if an address is in use."""
        try:
            for publisher in self.by_rank:
                publisher.open(self._context)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close all sockets; their ports are free when this returns."""
        for publisher in self.by_rank:
            await publisher.close()
        self._context.term()

    def sources(self) -> dict[str, dict[str, Any]]:
        return {str(rank): publisher.source() for rank, publisher in enumerate(self.by_rank)}
