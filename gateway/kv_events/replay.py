"""One request for missed messages, and its answer.

vLLM numbers its messages from 0 in each process. It answers a request for missed messages from a buffer of its last
ones, then sends an end marker. Its socket silently drops what a slow receiver cannot take, so an answer can have holes,
or no end; it is then requested again from there. Each request has a connection of its own, so that a late answer is
never mistaken for the answer to the next. Missed messages arrive a second time as live ones, which is no restart: a
restart is a live number that is not above the live number before it.
"""

from collections.abc import Callable, Iterator
from enum import Enum

import zmq
from xxhash import xxh3_64_intdigest

from gateway.kv_events.wire import END_OF_REPLAY, MAX_PAYLOAD_BYTES, SEQUENCE_BYTES

RECEIVE_QUEUE_MESSAGES = 512  # messages beyond it may be dropped, and are requested again
PAUSE_SECONDS = 1.0  # until the next message, or the end marker


class Replay:
    """The request, sent on creation. The owner closes it."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, start: int, deadline: float, *, proving: bool
    ) -> None:
        self.deadline = deadline
        self.proving = proving  # the first message is one that was used before
        self.received = 0
        self.used = False
        self.torn = False  # a message in the middle is missing
        self.ended = False
        self.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES),
            (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
        ):
            self.socket.setsockopt(option, value)
        self.socket.connect(endpoint)
        self.socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])

    def messages(self, clock: Callable[[], float]) -> Iterator[tuple[int, bytes]]:
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
                self.deadline = clock() + PAUSE_SECONDS
                yield int.from_bytes(frames[-2], "big"), frames[-1]

    @property
    def is_unproven(self) -> bool:
        return self.proving and not self.received

    def accepts(self, sequence: int, expected: int | None) -> bool:
        """Whether to use a message; notes it if messages before it are missing."""
        if expected is not None and sequence != expected and (sequence < expected or self.received > 1):
            self.torn = self.torn or sequence > expected
            return False
        self.used = True
        return True

    def close(self) -> None:
        self.socket.close()


class MessagePlace(Enum):
    """Position of a live message in its sequence."""

    NEXT = "next"
    REPEATED = "repeated"  # already received by a replay
    AFTER_GAP = "after_gap"
    RESTARTED = "restarted"  # another process's sequence


class Continuity:
    """Sequence numbers of one publisher. `expected` None = nothing was received or requested yet."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self._last_live: int | None = None
        self._last_digest: int | None = None

    def reset(self) -> None:
        self.expected = self._last_live = self._last_digest = None

    def begin(self, sequence: int) -> None:
        """Continue with this number, whatever was before it."""
        self.expected = sequence
        self._last_digest = None

    def place(self, sequence: int) -> MessagePlace:
        """Judge a live message; to be called once for each, in order."""
        last, self._last_live = self._last_live, sequence
        if last is not None and sequence <= last:
            return MessagePlace.RESTARTED
        if self.expected is None or sequence > self.expected:
            return MessagePlace.AFTER_GAP
        return MessagePlace.NEXT if sequence == self.expected else MessagePlace.REPEATED

    def took(self, sequence: int, payload: bytes) -> None:
        self.expected = sequence + 1
        self._last_digest = xxh3_64_intdigest(payload)

    @property
    def can_prove(self) -> bool:
        """Whether a message was used whose repetition proves that the process is the same."""
        return self._last_digest is not None

    def proves(self, sequence: int, payload: bytes) -> bool:
        """Whether this is the last message that was used, again."""
        return (
            self.expected is not None
            and sequence == self.expected - 1
            and xxh3_64_intdigest(payload) == self._last_digest
        )
