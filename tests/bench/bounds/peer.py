"""A client on a blocking socket: patient to a deadline, surprised by nothing."""

import re
import select
import socket
import time

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_END_OF_CHUNKS = b"0\r\n\r\n"


class Peer:
    """One connection to the gateway."""

    def __init__(self, port: int, deadline: float, receive_buffer_bytes: int = 0) -> None:
        self._deadline = deadline
        self._socket = socket.socket()
        if receive_buffer_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.settimeout(max(0.1, deadline - time.monotonic()))
        self._socket.connect(("127.0.0.1", port))

    def send(self, data: bytes) -> bool:
        """Send it all, unless the gateway answers before or closes; whether it went out."""
        view = memoryview(data)
        self._socket.setblocking(False)
        try:
            while view:
                if self._events(select.POLLIN | select.POLLOUT, self._deadline - time.monotonic()) != select.POLLOUT:
                    return False
                view = view[self._socket.send(view[:1048576]) :]
        except OSError:
            return False
        return True

    def push(self, data: bytes, seconds: float) -> None:
        """Send what is taken within a time, and read nothing."""
        view, ends = memoryview(data), time.monotonic() + seconds
        self._socket.setblocking(False)
        try:
            while view and self._events(select.POLLOUT, ends - time.monotonic()) == select.POLLOUT:
                view = view[self._socket.send(view) :]
        except OSError:
            pass

    def answer(self) -> str:
        """The status of the next answer, read to its end; or what came instead."""
        received = bytearray()
        try:
            while not _is_complete(received):
                self._socket.settimeout(max(0.05, self._deadline - time.monotonic()))
                data = self._socket.recv(1048576)
                if not data:
                    return _status(received) or "closed"
                received += data
        except TimeoutError:
            return _status(received) or "no answer"
        except OSError:
            return _status(received) or "reset"
        return _status(received) or "no HTTP"

    def wait_for_end(self) -> str | None:
        """Wait until the gateway answers or closes; what it did, or None if it does nothing until the deadline."""
        said = self.answer()
        return None if said == "no answer" else said

    @property
    def is_open(self) -> bool:
        """The gateway has neither closed the connection nor reset it, as far as is known without reading."""
        return not self._events(select.POLLRDHUP)

    @property
    def has_answer(self) -> bool:
        """Something has arrived that was not read."""
        return self._events(select.POLLIN) == select.POLLIN

    def _events(self, wanted: int, seconds: float = 0.0) -> int:
        poll = select.poll()
        poll.register(self._socket, wanted)
        found = poll.poll(max(0.0, seconds) * 1000)
        return found[0][1] if found else 0

    def close(self) -> None:
        self._socket.close()


def _status(received: bytearray) -> str | None:
    found = _STATUS.match(received)
    return found[1].decode() if found else None


def _is_complete(received: bytearray) -> bool:
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return False
    length = _LENGTH.search(received, 0, head + 2)
    return len(received) >= head + 4 + int(length[1]) if length else received.endswith(_END_OF_CHUNKS)
