"""One request for messages that were missed, and what comes of it.

vLLM numbers its messages from 0 in each process. It answers a request for missed messages from a buffer of its last
ones, then sends an end marker. Its socket silently drops what a slow receiver cannot take, so an answer can have holes,
or no end; it is then requested again from there. Each request has a connection of its own, so that a late answer is
never taken for the answer to the next. Missed messages come a second time as live ones, which is no restart: only a
live number that is not above the live number before it is one.
"""

from collections.abc import Iterator
from enum import Enum

import zmq
from xxhash import xxh3_64_intdigest

from gateway.kv_events.wire import END_OF_REPLAY, MAX_PAYLOAD_BYTES, SEQUENCE_BYTES

RECEIVE_QUEUE_MESSAGES = 512  # what is sent beyond it may be dropped, and is asked for again


class Replay:
    """Asks on creation; `close` it."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, start: int, deadline: float, *, proving: bool
    ) -> None:
        self.deadline = deadline
        self.proving = proving  # the first message is one that was used before
        self.received = 0
        self.used = 0
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

    def messages(self) -> Iterator[tuple[int, bytes]]:
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
                yield int.from_bytes(frames[-2], "big"), frames[-1]

    def close(self) -> None:
        """What has not arrived yet is dropped."""
        self.socket.close()


class MessagePlace(Enum):
    """Where a live message stands."""

    NEXT = "next"
    REPEATED = "repeated"  # was already had by a replay
    AFTER_GAP = "after_gap"
    RESTARTED = "restarted"  # another process counts


class Continuity:
    """The numbers of one publisher. `expected` None = nothing was received or asked for yet."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self._last_live: int | None = None
        self._last_digest: int | None = None

    def reset(self) -> None:
        """Another process counts, or nothing is known."""
        self.expected = self._last_live = self._last_digest = None

    def begin(self, sequence: int) -> None:
        """Go on with this number, whatever was before it."""
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
        """Whether a message was used whose repetition proves that the same process still speaks."""
        return self._last_digest is not None

    def proves(self, sequence: int, payload: bytes) -> bool:
        """Whether this is the last message that was used, again."""
        return (
            self.expected is not None
            and sequence == self.expected - 1
            and xxh3_64_intdigest(payload) == self._last_digest
        )
