"""An engine's side of the wire: a publisher with the same sockets and messages, and a cache to speak of."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from gateway.features.exact.stream import END_OF_REPLAY

Event = dict[str, Any]


class Publisher:
    """PUB and ROUTER sockets on loopback, numbered messages, and a buffer of the last of them.

    Ports are chosen at the start; give them again to start anew at the same place.
    """

    def __init__(
        self,
        buffer_steps: int = 10_000,
        topic: str = "kv@test",
        ports: tuple[int, int] | None = None,
        replay: bool = True,
        connect_to: str | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that reports subscriptions
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.linger = self._router.linger = 0
        self._pub.xpub_verbose = True
        self._buffer = deque[tuple[int, bytes]](maxlen=buffer_steps)
        self._topic = topic.encode()
        self._lock = threading.Lock()
        self._next = 0
        self._ending = False
        self.replays: list[int] = []
        self.tear_at: int | None = None  # a message that the next answer lacks
        self.cut_at: int | None = None  # where the next answer ends without an end marker
        self.mute = False  # requests are not answered
        self.answering = threading.Event()  # otherwise requests wait
        self.answering.set()
        given = ports or (0, 0)
        if connect_to is None:
            self._pub.bind(f"tcp://127.0.0.1:{given[0] or '*'}")
        else:
            self._pub.connect(connect_to)
        self._router.bind(f"tcp://127.0.0.1:{given[1] or '*'}")
        self.endpoint = str(self._pub.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
        router = str(self._router.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
        self.replay_endpoint = router if replay else None
        self.ports = (int(self.endpoint.rpartition(":")[2]), int(router.rpartition(":")[2]))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As if the process ended."""
        self._ending = True
        self._thread.join()
        self._pub.close()
        self._context.term()

    def publish(self, *events: Event, lost: bool = False) -> int:
        """Number a message and send it, or let it be lost on the way."""
        return self.publish_payload(msgspec.msgpack.encode([1.5, list(events), 0]), lost=lost)

    def publish_payload(self, payload: bytes, lost: bool = False, topic: bytes | None = None) -> int:
        """The same with any payload and topic."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            if not lost:
                self._pub.send_multipart([self._topic if topic is None else topic, number.to_bytes(8, "big"), payload])
            self._buffer.append((number, payload))
            return number

    def wait_for_subscriber(self) -> None:
        """A message that is published before its subscriber is known is lost."""
        with self._lock:
            assert self._pub.poll(5000), "no subscriber"
            self._pub.recv()

    def send_frames(self, *frames: bytes) -> None:
        """Anything."""
        with self._lock:
            self._pub.send_multipart(frames)

    def _serve(self) -> None:
        while not self._ending:
            if self._router.poll(5) and self.answering.wait(0.005):
                with suppress(zmq.ZMQError), self._lock:
                    self._answer(*self._router.recv_multipart())
        self._router.close()

    def _answer(self, client: bytes, _: bytes, start: bytes) -> None:
        first = int.from_bytes(start, "big")
        self.replays.append(first)
        if self.mute:
            return
        torn, self.tear_at = self.tear_at, None
        cut, self.cut_at = self.cut_at, None
        for number, payload in self._buffer:
            if number == cut:
                return
            if number >= first and number != torn:
                self._router.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
        self._router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


class Cache:
    """A naive prefix cache of one engine: which events it would publish, and what it holds in truth."""

    def __init__(self, capacity: int = 10**9, block_tokens: int = 4) -> None:
        self.block_tokens = block_tokens
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()  # a block is its whole prefix

    @property
    def prefixes(self) -> set[tuple[int, ...]]:
        """Every block that is held, as the tokens from the prompt's start to the block's end."""
        return set(self._blocks)

    def hit_blocks(self, tokens: Sequence[int]) -> int:
        """Leading blocks of the prompt that are held."""
        hits = 0
        for prefix in self._prefixes_of(tokens):
            if prefix not in self._blocks:
                break
            hits += 1
        return hits

    def serve(self, tokens: Sequence[int]) -> list[Event]:
        """Compute a prompt: its missing blocks are stored, the least recent ones evicted."""
        hits, size = self.hit_blocks(tokens), self.block_tokens
        prefixes = self._prefixes_of(tokens)
        events: list[Event] = []
        if len(prefixes) > hits:
            events.append(
                stored(
                    [digest(prefix) for prefix in prefixes[hits:]],
                    tokens[hits * size : len(prefixes) * size],
                    digest(prefixes[hits - 1]) if hits else None,
                    size,
                )
            )
        for prefix in reversed(prefixes):
            self._blocks[prefix] = None
            self._blocks.move_to_end(prefix)
        while len(self._blocks) > self._capacity:
            evicted, _ = self._blocks.popitem(last=False)
            events.append(removed([digest(evicted)]))
        return events

    def reset(self) -> list[Event]:
        """Forget everything."""
        self._blocks.clear()
        return [{"type": "AllBlocksCleared"}]

    def _prefixes_of(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block_tokens
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]


def digest(prefix: tuple[int, ...]) -> int:
    """The engine's own hash."""
    return hash(prefix) & (1 << 64) - 1


def stored(hashes: Iterable[int | bytes], tokens: Sequence[int], parent: int | bytes | None, size: int) -> Event:
    """A BlockStored event with the fields that vLLM sends."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": None,
    }


def removed(hashes: Iterable[int | bytes]) -> Event:
    """A BlockRemoved event with the fields that vLLM sends."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}
