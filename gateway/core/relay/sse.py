"""A stream of server-sent events on its way through, and the token counts in it.

Only whole events are passed on, so that a stream can be ended cleanly at any time. Counts are read without parsing the
rest, and limited to what is possible.
"""

import re
from typing import Any

import orjson

from gateway.core.request import DONE_MARKER, Usage

_MAX_PARTIAL_BYTES = 131072
_KEPT_BYTES = 4096  # of the end of a longer event, so that the usage there is not cut in two
_DONE = DONE_MARKER + b"\n\n"
_EVENT_END = re.compile(rb"(\n\r?\n)")  # JSON holds no line ends; a carriage return before them stays at the event
_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{')  # and not null, which some engines put into every event
_ERROR = b'data: {"error"'
_FINISH = b'"finish_reason":"'  # of the last event of a sequence
ABORTED = _FINISH + b'abort"'  # an engine that is shutting down ends its answers like this, as if complete


class EventStream:
    """Cuts a byte stream at event ends, remembers the places of usage, and notes the end marker.

    `done_marker` is the start of a line that only a complete answer holds; without one, the end of the body is the end.
    `failure` is the event with which the backend gave the answer up, if it did: that event and all that follows, even
    an end marker, are not passed on. With hidden usage, the last event of each sequence waits for the usage event:
    vLLM's has the fingerprint that the client would have got in those last events.
    """

    def __init__(self, done_marker: bytes | None, hides_usage: bool) -> None:
        self._done_marker = done_marker
        self._hides_usage = hides_usage
        self._partial = bytearray()
        self._previous = b""
        self._last = b""
        self._within = False  # the beginning of an event was passed on, but not its end
        self._ends: list[bytes] = []  # last events of sequences that wait, each before its line ends
        self.ended = False  # the last event was [DONE]: the answer is complete, though its framing may not be
        self.failure = b""
        self.usage_first = b""
        self.usage_last = b""

    def skip(self, data: bytes) -> None:
        """Whole events, in chunks, were passed on; `event_chunks` found nothing to read in them, and no [DONE]."""
        self._previous, self._last = self._last, data

    def take(self, data: bytes) -> bytes:
        """Bytes that may be passed on now: up to the last event end, without usage that the client did not request.

        An overlong event is passed on in pieces; the first and the last are remembered.
        """
        was_within = self._within
        if self._partial or data[-2:] != b"\n\n":
            data = self._cut(data)
            if not data:
                return b""
        # Not `in`, which tries to take bytes for a number first, at the cost of another search.
        if self.failure or data.find(_ERROR) >= 0 or data.find(_FINISH) >= 0:
            data = self._up_to_failure(data)
            if self._hides_usage and not (data := self._without_ends(data)):
                return b""
        if not (was_within and self._within):
            self._previous, self._last = self._last, data if len(data) <= _KEPT_BYTES else self._marker_in(data)
        if data.endswith(_DONE):
            self.ended = self._done_marker is not None
        if data.find(b'"usage') >= 0 and _HAS_USAGE.search(data):
            self.usage_last = data
            if not self.usage_first:
                self.usage_first = data
        elif not self._ends:
            return data
        return self._without_usage(data) if self._hides_usage else data

    @property
    def at_event_end(self) -> bool:
        """Whether the last passed bytes ended an event."""
        return not self._within

    @property
    def complete(self) -> bool:
        """The answer's end marker was seen."""
        marker = self._done_marker
        if marker is None:
            return True
        if self._within:
            return False
        return bool(self._marker_in(self._last) or self._marker_in(self._previous))

    def _marker_in(self, data: bytes) -> bytes:
        """The end marker if a line starts with it; the only state kept of long data."""
        marker = self._done_marker
        if marker is None:
            return b""
        lines = b"\n" + data  # the same bytes inside a line are text that a model wrote
        is_there = b"\n" + marker in lines or b"\n" + marker.replace(b": ", b":", 1) in lines  # the space is optional
        return marker if is_there else b""

    def _up_to_failure(self, data: bytes) -> bytes:
        if self.failure:
            return b""
        pieces = _EVENT_END.split(data)
        for number, event in enumerate(pieces):
            # Without an end marker, as in responses, events repeat parts of the request.
            if _ERROR in event or (ABORTED in event and self._done_marker is not None):
                self.failure = event.removesuffix(b"\r")
                return b"".join(pieces[:number])
        return data

    def _without_ends(self, data: bytes) -> bytes:
        """All but the last events of sequences."""
        pieces = _EVENT_END.split(data)  # events and, after each, its end
        for at in range(0, len(pieces) - 1, 2):
            is_last = _FINISH in pieces[at] and not _HAS_USAGE.search(pieces[at])
            if is_last and sum(map(len, self._ends)) <= _MAX_PARTIAL_BYTES:
                self._ends += pieces[at : at + 2]
                pieces[at] = pieces[at + 1] = b""
        return b"".join(pieces)

    def _without_usage(self, data: bytes) -> bytes:
        """Events less the usage that their client did not ask for. Before it, or the end marker, come the events
        that wait; of an event that holds nothing else, only the engine's fingerprint is left, in those.
        """
        pieces = _EVENT_END.split(data)
        for at in range(0, len(pieces) - 1, 2):
            event = pieces[at]
            document = _document_of(event) if _HAS_USAGE.search(event) else None
            has_usage = document is not None and document.pop("usage", None) is not None
            if document is not None and has_usage and not document.get("choices"):
                pieces[at] = pieces[at + 1] = b""
                if fingerprint := document.get("system_fingerprint"):
                    self._ends[::2] = [_with_fingerprint(each, fingerprint) for each in self._ends[::2]]
            elif document is not None and has_usage:
                pieces[at] = _with_document(event, document)
            if has_usage or self._marker_in(event):
                pieces[at], self._ends = b"".join(self._ends) + pieces[at], []
        return b"".join(pieces)

    def _cut(self, data: bytes) -> bytes:
        partial = self._partial
        start = max(0, len(partial) - 3)
        partial += data
        bare, with_returns = partial.rfind(b"\n\n", start), partial.rfind(b"\n\r\n", start)
        end = max(bare + 2 if bare >= 0 else 0, with_returns + 3 if with_returns >= 0 else 0)
        if end:
            self._within = False
        elif len(partial) > _MAX_PARTIAL_BYTES:
            self._within = True
            end = len(partial) - _KEPT_BYTES
        else:
            return b""
        whole = bytes(partial[:end])
        del partial[:end]
        return whole


def _document_of(event: bytes) -> dict[str, Any] | None:
    """The object that an event holds; None if it holds none."""
    try:
        document = orjson.loads(b"\n".join([line[5:] for line in event.splitlines() if line.startswith(b"data:")]))
    except orjson.JSONDecodeError:
        return None
    return document if type(document) is dict else None


def _with_fingerprint(event: bytes, fingerprint: Any) -> bytes:
    document = _document_of(event)
    if document is None or "system_fingerprint" in document:
        return event
    return _with_document(event, document | {"system_fingerprint": fingerprint})


def _with_document(event: bytes, document: dict[str, Any]) -> bytes:
    others = [line for line in event.splitlines() if not line.startswith(b"data:")]
    line = b"data: " + orjson.dumps(document) + event[len(event.rstrip(b"\r")) :]
    return (b"\r\n" if b"\r\n" in event else b"\n").join([*others, line])


_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_MOST_TRIES = 8  # places in a piece that look like usage, from the last one on


def read_stream_usage(*pieces: bytes) -> Usage | None:
    """The usage in these pieces of a stream; later events count over earlier ones.

    Parts of a request (tools, metadata) may have this name as well: only the places used by engines count.
    """
    merged: dict[str, Any] = {}
    for piece in dict.fromkeys(pieces):  # often the same one
        for event in _EVENT_END.split(piece):
            if b'"usage"' not in event:
                continue
            document = _document_of(event)
            if document is None:
                merged |= last_usage(event)  # part of an event that was too long
                continue
            for holder in (document, document.get("response"), document.get("message")):
                if type(holder) is dict and type(found := holder.get("usage")) is dict:
                    merged |= found
    return Usage.of(merged)


def last_usage(piece: bytes) -> dict[str, Any]:
    """The last object in a piece that is named so; other values of that name are passed over."""
    place = len(piece)
    for _ in range(_MOST_TRIES):
        place = piece.rfind(b'"usage"', 0, place)
        if place < 0:
            break
        if (match := _USAGE.match(piece, place)) is None:
            continue
        try:
            found: dict[str, Any] = orjson.loads(match[1])
        except orjson.JSONDecodeError:
            continue
        if found:
            return found
    return {}
