"""Where the answer to a line is collected: as it comes, or put together from a stream."""

import asyncio
from collections.abc import Callable

from gateway.core.errors import GatewayError, MemoryFull, WrongAnswer
from gateway.core.resources import Holding
from gateway.features.batches.partial import PartialAnswer

_MOST_ANSWER_BYTES = 67108864
_TOO_LARGE = f"The response exceeds the limit of {_MOST_ANSWER_BYTES} bytes."
_READ_BYTES = 65536  # of a stream: events are cheap to keep until they are read
_STEP_BYTES = 8192  # in which memory is reserved


class LineSink:
    """Collects one whole answer, whose memory is all that `holding` has. At the bound, `fetching` ends the request."""

    address = ""

    def __init__(self, holding: Holding) -> None:
        self.begun = self.chunked = False
        self.status = 0
        self.is_revoked = False
        self.fetching = asyncio.Timeout(None)
        self.error: GatewayError | None = None  # why no more is kept
        self._kept = bytearray()  # an object for each piece would take many times the memory of short ones
        self._room_bytes = 0  # for how many of them memory is reserved
        self._partial: PartialAnswer | None = None
        self._holding = holding

    @property
    def continues(self) -> bool:
        """Whether what has come of the answer is kept if its request ends early."""
        return self._partial is not None and self._partial.continues

    @property
    def blocked(self) -> bool:
        return False

    def expect_stream(self, partial: PartialAnswer) -> None:
        """Put a stream together in this. Its chunks come as they are, with their framing, which has no events."""
        self._partial, self.chunked = partial, True
        self._reserve(0)

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        self.begin(status, content_type, extra)
        self.write(body)

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:  # noqa: ARG002
        self.begun, self.status = True, status
        if not content_type.startswith(b"text/event-stream"):
            self._partial = None  # it is an error, or the backend does not stream

    def write(self, data: bytes, framed: bool = False) -> bool:  # noqa: ARG002
        """Keep body bytes. True = no more are taken."""
        if self.error is not None:
            return True
        self._kept += data
        return len(self._kept) > self._room_bytes and not self._makes_room()

    def _makes_room(self) -> bool:
        """Whether there is memory for what is kept; else the request ends."""
        try:
            if self._partial is not None and len(self._kept) >= _READ_BYTES:
                self._read(self._partial)
            self._reserve(_STEP_BYTES)
        except (WrongAnswer, MemoryFull) as error:
            self.error = error.again()
            self.close()
            self._end_request()
            return False
        return True

    def close(self) -> None:
        """Drop all that is kept: the request has ended, but what remembers it may hold this."""
        self._kept, self._partial = bytearray(), None
        self._holding.release()

    def _reserve(self, more_bytes: int) -> None:
        """Have memory for what is kept, and for so many bytes as they come. Raises WrongAnswer or MemoryFull."""
        size_bytes = len(self._kept) + (0 if self._partial is None else self._partial.size_bytes)
        if size_bytes > _MOST_ANSWER_BYTES:
            raise WrongAnswer(_TOO_LARGE)
        self._holding.fit(size_bytes + more_bytes)
        self._room_bytes = len(self._kept) + more_bytes

    def _read(self, partial: PartialAnswer) -> None:
        """Put together what has come of a stream. Raises WrongAnswer or MemoryFull."""
        data = bytes(self._kept)
        self._kept.clear()
        partial.feed(data)
        self._reserve(0)

    def whole(self) -> bytes:
        """The body of the answer, which has ended. Raises WrongAnswer or MemoryFull."""
        partial = self._partial
        if partial is None:
            data = bytes(self._kept)
            self._kept.clear()  # `data` has its memory
            return data
        self._read(partial)
        body = partial.body()
        if len(body) > _MOST_ANSWER_BYTES:  # escapes and other letters are longer than the text that was counted
            raise WrongAnswer(_TOO_LARGE)
        return body

    def cut(self) -> PartialAnswer | None:
        """What can be continued of an answer that was cut."""
        partial = self._partial
        if partial is None:
            return None
        try:
            self._read(partial)
        except (WrongAnswer, MemoryFull):
            return None
        return partial if partial.cut() else None

    def revoke(self) -> None:
        """End the request: its lease is revoked."""
        self.is_revoked = True
        self._end_request()

    def _end_request(self) -> None:
        if not self.fetching.expired():
            self.fetching.reschedule(asyncio.get_running_loop().time())

    def set_backend_headers(self, lines: bytes) -> None:
        """Dropped: the answer's headers are not kept."""

    def add_headers(self, lines: bytes) -> None:
        """Dropped: the answer's headers are not kept."""

    def comment(self, blank_line: bool = True) -> None:
        """Dropped: no client reads keep-alive comments here."""

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        """It is never full: at its bound, the request ends."""

    def end(self) -> None:
        """Nothing is left to do: the answer is read when the request has ended."""
