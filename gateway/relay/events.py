"""A stream of server-sent events on its way through: whole events only, so that it can be ended cleanly at any time."""

_MAX_PARTIAL_BYTES = 1048576
_DONE = b"data: [DONE]\n\n"
_ERROR = b'data: {"error"'
ABORTED = b'"finish_reason":"abort"'  # an engine that is shutting down ends its answers like this, as if complete


class EventStream:
    """Cuts a byte stream at event ends, remembers where usage was, and whether the end marker came.

    `done_marker` is how a line starts that only a complete answer holds; without one, the end of the body is the end.
    `failure` is the event with which the backend gave the answer up, if it did: that event and all that follows, even
    an end marker, are not passed on.
    """

    __slots__ = (
        "_done_marker", "_hides_usage", "_last", "_partial", "_previous", "ended", "failure", "usage_first",
        "usage_last",
    )  # fmt: skip

    def __init__(self, done_marker: bytes | None, hides_usage: bool) -> None:
        self._done_marker = done_marker
        self._hides_usage = hides_usage
        self._partial = bytearray()
        self._previous = b""
        self._last = b""
        self.ended = False  # the last event was [DONE]: the answer is complete, though its framing may not be
        self.failure = b""
        self.usage_first = b""
        self.usage_last = b""

    def take(self, data: bytes) -> bytes:
        """Bytes that may be passed on now: up to the last event end, less what the client did not ask for."""
        if self._partial or not data.endswith(b"\n\n"):
            data = self._cut(data)
            if not data:
                return b""
        if _ERROR in data or ABORTED in data or self.failure:
            data = self._up_to_failure(data)
        self._previous, self._last = self._last, data
        if data.endswith(_DONE):
            self.ended = self._done_marker is not None
        if b'"usage"' in data:
            self.usage_last = data
            if not self.usage_first:
                self.usage_first = data
            if self._hides_usage:
                return _without_usage(data)
        return data

    @property
    def complete(self) -> bool:
        """The answer's end marker was seen."""
        marker = self._done_marker
        return marker is None or _has_line(self._last, marker) or _has_line(self._previous, marker)

    def _up_to_failure(self, data: bytes) -> bytes:
        if self.failure:
            return b""
        separator = _separator(data)
        events = data.split(separator)
        for number, event in enumerate(events):
            if _ERROR in event or ABORTED in event:
                self.failure = event
                return separator.join([*events[:number], b""])
        return data

    def _cut(self, data: bytes) -> bytes:
        partial = self._partial
        start = max(0, len(partial) - 3)
        partial += data
        bare, with_returns = partial.rfind(b"\n\n", start), partial.rfind(b"\r\n\r\n", start)
        end = max(bare + 2 if bare >= 0 else 0, with_returns + 4 if with_returns >= 0 else 0)
        if not end:
            if len(partial) <= _MAX_PARTIAL_BYTES:
                return b""
            end = len(partial)  # no event is that long: pass it on as it is
        whole = bytes(partial[:end])
        del partial[:end]
        return whole


def _has_line(data: bytes, start: bytes) -> bool:
    """Whether a line starts so; the same bytes inside a line are text that a model wrote."""
    return data.startswith(start) or b"\n" + start in data


def _without_usage(data: bytes) -> bytes:
    """Drop the events that only carry usage."""
    separator = _separator(data)
    kept = [event for event in data.split(separator) if not (b'"choices":[]' in event and b'"usage"' in event)]
    return separator.join(kept)


def _separator(data: bytes) -> bytes:
    """What stands between events: JSON holds no line ends, so either spelling is found safely."""
    return b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
