"""Reading token streams."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtest.drive.client import StreamWatch

_ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
_WORD = b'data: {"choices":[{"delta":{"content":"word"}}],"usage":null}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
_DONE = b"data: [DONE]\n\n"


def _watch(*reads: bytes) -> StreamWatch:
    watch = StreamWatch()
    for moment, data in enumerate(reads):
        watch.feed(data, float(moment))
    watch.finish()
    return watch


def test_the_first_token_is_the_first_content_and_not_the_role_chunk() -> None:
    watch = _watch(_ROLE, _WORD, _WORD, _USAGE + _DONE)
    assert watch.first_content == 1.0
    assert watch.read_times == [1.0, 2.0]
    assert watch.events == 2
    assert watch.done


def test_usage_is_the_last_one_reported() -> None:
    early = b'data: {"choices":[{"delta":{"content":"x"}}],"usage":{"completion_tokens":1}}\n\n'
    assert _watch(early, _USAGE, _DONE).usage() == {"prompt_tokens": 9, "completion_tokens": 2}


def test_an_event_that_differs_in_more_than_its_text_is_looked_at() -> None:
    counted = b'data: {"choices":[{"delta":{"content":"more"}}],"usage":{"completion_tokens":2}}\n\n'
    quoted = rb'data: {"choices":[{"delta":{"content":"\"}}],\"usage\":null}"}}],"usage":null}' + b"\n\n"
    empty = _WORD.replace(b"word", b"")
    failed = b'data: {"choices":[{"delta":{"content":"word"}}],"error":{"message":"died"},"usage":null}\n\n'
    watch = _watch(_WORD, quoted, empty, counted, failed)
    assert watch.read_times == [0.0, 1.0, 3.0, 4.0]
    assert watch.usage() == {"completion_tokens": 2}
    assert watch.error == "died"


def test_events_that_come_in_one_read_are_counted_apart_but_timed_once() -> None:
    watch = _watch(_WORD * 5)
    assert watch.events == 5
    assert watch.read_times == [0.0]


def test_keep_alive_comments_are_neither_content_nor_a_first_event() -> None:
    watch = _watch(b": keep-alive\n\n", _WORD)
    assert watch.first_event == 1.0


def test_an_error_event_is_reported_and_text_that_speaks_of_errors_is_not_one() -> None:
    said = json.dumps({"choices": [{"delta": {"content": '{"error": {"message": "no"}}'}}]}).encode()
    assert _watch(b"data: " + said + b"\n\n").error is None
    watch = _watch(b'data: {"error": {"message": "engine died"}}\n\n')
    assert (watch.error, watch.error_is_object, watch.first_content) == ("engine died", True, None)
    watch = _watch(_WORD, b'data: {"error": "engine died"}\n\n')
    assert (watch.error, watch.error_is_object, watch.first_content) == ("engine died", False, 0.0)


def test_a_stream_without_its_end_marker_is_not_done() -> None:
    assert not _watch(_WORD, _USAGE).done
    assert _watch(_WORD, b"data: [DONE]").done


def test_text_that_quotes_the_end_marker_does_not_end_the_stream() -> None:
    said = json.dumps({"choices": [{"text": "data: [DONE]\n\n"}]}).encode()
    watch = _watch(b"data: " + said + b"\n\n")
    assert not watch.done
    assert watch.events == 1


def test_reasoning_and_tool_calls_count_as_content() -> None:
    assert _watch(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n').events == 1
    assert _watch(b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n').events == 1
    assert _watch(b'data: {"choices":[{"delta":{"tool_calls":[]}}]}\n\n').events == 0


@given(st.lists(st.integers(0, 600), max_size=12), st.booleans())
def test_where_the_network_cuts_the_bytes_changes_nothing(cuts: list[int], crlf: bool) -> None:
    whole = _ROLE + _WORD + b": keep-alive\n\n" + _WORD + _USAGE + _DONE
    if crlf:
        whole = whole.replace(b"\n", b"\r\n")
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    watch = _watch(*(whole[a:b] for a, b in pairwise(edges)))
    assert (watch.events, watch.done, watch.error) == (2, True, None)
    assert watch.usage() == {"prompt_tokens": 9, "completion_tokens": 2}
