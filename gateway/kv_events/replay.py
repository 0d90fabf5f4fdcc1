"""One request for messages that were missed, and what comes of it.

vLLM answers from a buffer of its last messages, then sends an end marker. Its socket drops silently what a slow
receiver has no room for, so an answer can have holes, or no end; it is then asked for again from there. Each request
has a connection of its own: what is late for one is never taken for an answer to the next.
"""

from collections.abc import Iterator

import zmq

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
