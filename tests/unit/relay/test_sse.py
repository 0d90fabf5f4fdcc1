"""Whole events only, whatever pieces the stream arrives in."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.relay.sse import EventStream, read_stream_usage
from gateway.core.request import Usage

DONE = b"data: [DONE]"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}'
ERROR = b'data: {"error":{"message":"engine died"}}'
ABORT = b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}'
SEPARATORS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n\r\n"])


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """Something that a backend may send as one event."""
    tricks = ['"usage"', '"choices":[]', "data: [DONE]", '\ndata: {"error"', '"finish_reason":"abort"']
    text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(tricks))
    chunk = b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, separators=(",", ":")).encode()
    return draw(st.sampled_from([chunk, b":", b": ping", b"event: x\ndata: {}"]))


def cut(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(place % (len(whole) + 1) for place in cuts)})
    return [whole[start:end] for start, end in pairwise(edges)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(st.lists(events(), max_size=6), SEPARATORS, CUTS, st.sampled_from([b"", b"data: unfin", b"\r", b"x\r\n\r"]))
def test_any_pieces_in_give_the_same_whole_events_out(
    stream: list[bytes], separator: bytes, cuts: list[int], rest: bytes
) -> None:
    whole = b"".join(event + separator for event in stream)
    taken, out = EventStream(DONE, hides_usage=False), b""
    for piece in cut(whole + rest, cuts):
        passed = taken.take(piece)
        assert passed == b"" or passed.endswith(separator)
        out += passed
    assert out == whole
    assert not taken.complete
    assert not taken.failure


@given(st.lists(events(), max_size=5), SEPARATORS, CUTS)
def test_the_end_marker_is_found_in_any_pieces(stream: list[bytes], separator: bytes, cuts: list[int]) -> None:
    taken = EventStream(DONE, hides_usage=False)
    for piece in cut(b"".join(event + separator for event in [*stream, DONE]), cuts):
        assert not taken.complete
        taken.take(piece)
    assert taken.complete


@given(st.lists(events(), max_size=4), SEPARATORS, CUTS, st.booleans())
def test_usage_is_found_in_any_pieces_and_hidden_if_not_requested(
    stream: list[bytes], separator: bytes, cuts: list[int], hidden: bool
) -> None:
    taken = EventStream(DONE, hides_usage=hidden)
    whole = [*stream, USAGE, DONE]
    out = b"".join(taken.take(piece) for piece in cut(b"".join(event + separator for event in whole), cuts))
    shown = [event for event in whole if event != USAGE] if hidden else whole
    assert out == b"".join(event + separator for event in shown)
    assert read_stream_usage(taken.usage_first, taken.usage_last) == Usage(9, 2)
    assert taken.complete


@given(
    st.lists(events(), max_size=4), st.sampled_from([ERROR, ABORT]), st.lists(events(), max_size=2), SEPARATORS, CUTS
)
def test_from_the_event_on_with_which_a_backend_gives_up_nothing_is_passed_on(
    before: list[bytes], failure: bytes, after: list[bytes], separator: bytes, cuts: list[int]
) -> None:
    taken = EventStream(DONE, hides_usage=False)
    whole = b"".join(event + separator for event in [*before, failure, *after, DONE])
    out = b"".join(taken.take(piece) for piece in cut(whole, cuts))
    assert out == b"".join(event + separator for event in before)
    assert taken.failure == failure


def test_without_a_marker_the_end_of_the_body_is_the_end() -> None:
    assert EventStream(None, hides_usage=False).complete


@pytest.mark.parametrize(
    ("stream", "complete"),
    [
        (b"event: message_stop\ndata: {}\n\n", True),
        (b"event: x\ndata: {}\n\nevent: message_stop\r\ndata: {}\r\n\r\n", True),
        (b'event: x\ndata: {"text":"event: message_stop"}\n\n', False),
        (b"xevent: message_stop\n\n", False),
    ],
)
def test_an_end_marker_counts_only_at_the_start_of_a_line(stream: bytes, complete: bool) -> None:
    taken = EventStream(b"event: message_stop", hides_usage=False)
    taken.take(stream)
    assert taken.complete == complete


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (b'data: {"choices": [], "usage": {"prompt_tokens": 9}}', b""),
        (b'data:{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {}} , "choices" : [ ] }', b""),
        (b'id: 7\ndata: {"choices":[],\ndata: "usage":{"prompt_tokens":9}}', b""),
        (b'data: {"usage":{"prompt_tokens":9}}', b""),
        (
            b'data: {"choices": [{"delta": {}}], "usage": {"prompt_tokens": 9}, "created": 1}',
            b'data: {"choices":[{"delta":{}}],"created":1}',
        ),
        (b': hello\r\ndata: {"choices":[1],"usage":{}}', b': hello\r\ndata: {"choices":[1]}'),
        (b'data: {"choices": [{"delta": {}}], "usage": null}', None),
        (b'data: {"choices": [{"delta": {"usage":{}}}], "usage": null}', None),
        (b'data: {"choices": [], "usage": {', None),
        (b'data: [{"usage": {}}]', None),
    ],
)
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\n\n", b"\n\r\n"])
def test_usage_is_hidden_however_it_is_printed_and_nothing_else(event: bytes, shown: bytes | None, end: bytes) -> None:
    taken, others = EventStream(DONE, hides_usage=True), b": ping" + end + b'data: {"choices":[{}]}' + end
    rest = b"" if shown == b"" else (event if shown is None else shown) + end
    assert taken.take(others + event + end + others) == others + rest + others


@pytest.mark.parametrize("more", [b"", b',"usage":null', b', "usage": null'])
def test_an_event_without_usage_is_not_so_much_as_copied(more: bytes) -> None:
    event = b'data: {"choices":[{"delta":{"content":"a"}}]%b}\n\n' % more
    assert EventStream(DONE, hides_usage=True).take(event) is event


def test_reported_usage_is_kept_over_events_without_usage() -> None:
    taken = EventStream(DONE, hides_usage=False)
    taken.take(USAGE + b"\n\n")
    taken.take(b'data: {"choices":[{}],"usage":null}\n\n')
    assert read_stream_usage(taken.usage_last) == Usage(9, 2)


@pytest.mark.parametrize("marker", [b"data: [DONE]", b"data:[DONE]"])
def test_the_end_marker_needs_no_space(marker: bytes) -> None:
    taken = EventStream(DONE, hides_usage=False)
    taken.take(marker + b"\n\n")
    assert taken.complete


def test_events_that_repeat_what_a_request_said_of_aborts_are_no_failure() -> None:
    event = b'data: {"type":"response.created","response":{"metadata":{"finish_reason":"abort"}}}\n\n'
    stream = EventStream(None, hides_usage=False)
    assert stream.take(event) == event
    assert not stream.failure


@given(st.integers(130_000, 500_000), CUTS, st.booleans())
def test_an_event_too_long_to_keep_is_passed_on_in_pieces_and_still_says_what_it_says(
    size: int, cuts: list[int], is_cut: bool
) -> None:
    usage = b'"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}},"user":null}}'
    last = b'event: response.completed\ndata: {"response":{"output":"%b",%b' % (b"a" * size, usage)
    whole = b"event: x\ndata: {}\n\n" + (last if is_cut else last + b"\n\n")
    taken, out = EventStream(b"event: response.completed", hides_usage=False), b""
    for piece in cut(whole, [place * 53 for place in cuts]):
        out += taken.take(piece)
        assert not taken.complete or out == whole
    assert whole.startswith(out)
    if is_cut:
        assert not taken.complete
    else:
        assert out == whole
        assert taken.complete
        assert read_stream_usage(taken.usage_first, taken.usage_last) == Usage(9, 2, 4)


def test_no_more_than_128_kibibytes_are_kept_of_something_that_never_ends() -> None:
    taken, sent, out = EventStream(DONE, hides_usage=False), b"", b""
    for number in range(100):
        sent += b"%d" % number * 15_000
        out += taken.take(b"%d" % number * 15_000)
        assert len(sent) - len(out) <= 131_072
        assert sent.startswith(out)


FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}'
SIGNED = FINISH[:-1] + b',"system_fingerprint":"fp"}'
LAST = USAGE[:-1] + b',"system_fingerprint":"fp"}'


@given(st.lists(events(), max_size=4), SEPARATORS, CUTS, st.booleans())
def test_the_fingerprint_of_hidden_usage_goes_to_the_last_event_of_the_sequence(
    stream: list[bytes], separator: bytes, cuts: list[int], hidden: bool
) -> None:
    taken = EventStream(DONE, hides_usage=hidden)
    whole = [*stream, FINISH, LAST, DONE]
    out = b"".join(taken.take(piece) for piece in cut(b"".join(event + separator for event in whole), cuts))
    shown = [*stream, SIGNED, DONE] if hidden else whole
    assert out == b"".join(event + separator for event in shown)
    assert read_stream_usage(taken.usage_first, taken.usage_last) == Usage(9, 2)
    assert taken.complete


@pytest.mark.parametrize(
    "after",
    [
        [DONE],
        [USAGE.replace(b"prompt_tokens", b"x"), DONE],  # without a fingerprint
        [b": ping", LAST.replace(b'"usage":{', b'"usage":null,"x":{'), DONE],
        [b'data: {"choices":[{"delta":{"content":"of another choice"}}]}', FINISH, DONE],
    ],
)
def test_the_last_event_of_a_sequence_comes_before_usage_and_the_end(after: list[bytes]) -> None:
    for pieces in ([*after], [b"\n\n".join(after)]):
        taken = EventStream(DONE, hides_usage=True)
        assert taken.take(FINISH + b"\n\n") == b""
        out = b"".join(taken.take(piece + b"\n\n") for piece in pieces)
        assert taken.complete
        shown = [each for each in after if b'"usage":{"' not in each and each != FINISH]
        assert sorted(out.split(b"\n\n")) == sorted([b"", *[FINISH] * (1 + after.count(FINISH)), *shown])
        assert out.endswith(FINISH + b"\n\n" + b"\n\n".join(shown[-1:]) + b"\n\n")


OTHER = b'data: {"choices":[{"index":1,"delta":{"content":"of another choice"}}]}'


@given(st.permutations([FINISH, FINISH, OTHER, OTHER, b": ping"]), SEPARATORS, CUTS)
def test_of_several_sequences_all_get_the_fingerprint_however_early_they_end(
    stream: list[bytes], separator: bytes, cuts: list[int]
) -> None:
    taken = EventStream(DONE, hides_usage=True)
    sent = b"".join(event + separator for event in [*stream, LAST, DONE])
    out = b"".join(taken.take(piece) for piece in cut(sent, cuts))
    shown = [*[each for each in stream if each != FINISH], SIGNED, SIGNED, DONE]
    assert out == b"".join(event + separator for event in shown)
    assert read_stream_usage(taken.usage_first, taken.usage_last) == Usage(9, 2)
    assert taken.complete


def test_ends_of_more_sequences_than_are_kept_are_passed_on_at_once() -> None:
    taken, count = EventStream(DONE, hides_usage=True), 10_000
    early = b"".join(taken.take(FINISH + b"\n\n") for _ in range(count))
    assert count * len(FINISH) - len(early) <= 131_072 + 2 * len(FINISH)
    late = taken.take(LAST + b"\n\n" + DONE + b"\n\n")
    assert early.count(FINISH) + late.count(SIGNED) == count
    assert late.endswith(SIGNED + b"\n\n" + DONE + b"\n\n")
