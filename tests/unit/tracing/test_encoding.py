"""Encoded by hand as the library's messages encode it: what one writes, the other reads."""

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from gateway.features.tracing.encoding import SPANS, Attribute, first_token, framed, identity, varint

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, 1, 127, 128, 16_383, 16_384])


def read(encoded: bytes) -> list[KeyValue]:
    return list(Span.FromString(encoded).attributes)


@given(st.text(max_size=300), st.text(max_size=300))
def test_a_text_is_read_as_it_was(key: str, value: str) -> None:
    assert read(Attribute(key).text(value)) == [KeyValue(key=key, value=AnyValue(string_value=value))]


@given(NUMBERS)
def test_a_number_is_read_as_it_was(value: int) -> None:
    assert read(Attribute("tokens").number(value)) == [KeyValue(key="tokens", value=AnyValue(int_value=value))]


@given(st.floats(allow_nan=False))
def test_a_real_number_is_read_as_it_was(value: float) -> None:
    assert read(Attribute("seconds").real(value)) == [KeyValue(key="seconds", value=AnyValue(double_value=value))]


@given(st.lists(st.text(max_size=200), max_size=8))
def test_texts_are_read_as_they_were(texts: list[str]) -> None:
    values = ArrayValue(values=[AnyValue(string_value=each) for each in texts])
    assert read(Attribute("engines").texts(texts)) == [KeyValue(key="engines", value=AnyValue(array_value=values))]


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1), st.booleans())
def test_ids_and_times_are_read_as_they_were(start: int, end: int, has_parent: bool) -> None:
    parent_id = b"c" * 8 if has_parent else b""
    span = Span.FromString(identity(b"a" * 16, b"b" * 8, parent_id, start, end) + first_token(end))
    assert (span.trace_id, span.span_id, span.parent_span_id) == (b"a" * 16, b"b" * 8, parent_id)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (start, end)
    assert [(event.name, event.time_unix_nano) for event in span.events] == [("first_token", end)]


@given(st.lists(st.integers(0, 400), max_size=4))
def test_spans_of_any_length_are_told_apart(lengths: list[int]) -> None:
    names = ["n" * length for length in lengths]
    encoded = b"".join(framed(SPANS, Span(name=name).SerializeToString()) for name in names)
    assert [span.name for span in ScopeSpans.FromString(encoded).spans] == names


def test_what_has_no_encoding_costs_a_character_and_not_the_export() -> None:
    [attribute] = read(Attribute("model").text("a\ud800b"))
    assert attribute.value.string_value == "a?b"
    assert len(varint(1 << 80)) <= 10  # what a broken backend counts
