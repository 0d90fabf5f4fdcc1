"""The variable parts of spans in protobuf's wire format: ids, times, and attributes with varying values.

All else of a span is a constant that the library's messages encode once (`tracing/spans.py`): concatenated encoded
messages are one message. Message objects for each attribute would cost five times as much.
"""

from collections.abc import Iterable
from struct import Struct

from opentelemetry.proto.common.v1.common_pb2 import KeyValue

# Tags of fields: their number and their type.
SPANS = b"\x12"  # of ScopeSpans
SCOPE_SPANS = b"\x12"  # of ResourceSpans
RESOURCE_SPANS = b"\x0a"  # of ExportTraceServiceRequest
_ATTRIBUTES = b"\x4a"  # of Span
_VALUE = b"\x12"  # of KeyValue
_STRING, _INT, _ARRAY = b"\x0a", b"\x18", b"\x2a"  # of AnyValue
_VALUES = b"\x0a"  # of ArrayValue
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"  # with their lengths
_TIMES = Struct("<BQBQ")
_START, _END = 0x39, 0x41
_DOUBLE = Struct("<Bd")
_DOUBLE_TAG = 0x21
_TIME = Struct("<Q")
_FIRST_TOKEN = b"\x5a\x16\x12\x0bfirst_token\x09"  # an event of Span with its length, its name, and its time's tag
_64_BITS = (1 << 64) - 1


def varint(number: int) -> bytes:
    """A number of 64 bits, seven at a time."""
    number &= _64_BITS
    if number < 0x80:
        return number.to_bytes(1, "little")
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def framed(tag: bytes, content: bytes) -> bytes:
    """A field whose length comes first."""
    return tag + varint(len(content)) + content


def identity(trace_id: bytes, span_id: bytes, parent_id: bytes, start: int, end: int) -> bytes:
    """The fields of a span that it has in common with no other; times are nanoseconds. `parent_id`: may be empty."""
    parent = _PARENT_ID + parent_id if parent_id else b""
    times = _TIMES.pack(_START, start, _END, end)
    return b"".join((_TRACE_ID, trace_id, _SPAN_ID, span_id, parent, times))


def first_token(time: int) -> bytes:
    """An event of a span, at this nanosecond."""
    return _FIRST_TOKEN + _TIME.pack(time)


class Attribute:
    """An attribute of spans, by its key."""

    def __init__(self, key: str) -> None:
        self._key = bytes(KeyValue(key=key).SerializeToString())

    def text(self, value: str) -> bytes:
        return self._valued(framed(_STRING, value.encode("utf-8", "replace")))

    def number(self, value: int) -> bytes:
        return self._valued(_INT + varint(value))

    def real(self, value: float) -> bytes:
        return self._valued(_DOUBLE.pack(_DOUBLE_TAG, value))

    def texts(self, values: Iterable[str]) -> bytes:
        each = [framed(_VALUES, framed(_STRING, value.encode("utf-8", "replace"))) for value in values]
        return self._valued(framed(_ARRAY, b"".join(each)))

    def _valued(self, value: bytes) -> bytes:
        return framed(_ATTRIBUTES, self._key + framed(_VALUE, value))
