"""The tokens of a session are found in its bytes, however they are cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request import Demand
from gateway.features.realtime.tunnel import SessionUsage
from gateway.features.realtime.websocket import text_frame

CONTEXT_TOKENS = 8192
AUDIO_SECOND_BYTES = 42_667  # of 16 bits at 16 kHz in base64


def usage_of(*pieces: bytes) -> tuple[int, int]:
    found = SessionUsage(Demand("m"), CONTEXT_TOKENS)
    for piece in pieces:
        found.passed(piece)
    return found.prompt_tokens, found.completion_tokens


def event(kind: str, **fields: Any) -> bytes:
    return text_frame(json.dumps({"type": kind, **fields}).encode())


def done(prompt: int, completion: int, **more: Any) -> bytes:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion, **more}
    return event("transcription.done", text='she said "usage": {"prompt_tokens": 9}', usage=usage)


DELTA = event("transcription.delta", delta='"usage"')
OTHERS = [
    DELTA,
    event("session.created", id="sess-1", created=1),
    event("transcription.done", text="la", usage=None),
    event("conversation.item.added", item={"content": [{"text": "x" * 9000}]}),
    event("response.done", response={"usage": {"input_tokens": 4, "output_tokens": 6}, "output": []}),
    b"\x89\x00",
]


@given(
    st.lists(
        st.tuples(st.integers(0, 8192), st.integers(1, 8192), st.booleans(), st.lists(st.sampled_from(OTHERS))),
        max_size=5,
    ),
    st.data(),
)
def test_all_reports_count_once_wherever_the_bytes_are_cut(
    reports: list[tuple[int, int, bool, list[bytes]]], data: st.DataObject
) -> None:
    stream, prompt_tokens, completion_tokens = b"", 0, 0
    for prompt, completion, nested, others in reports:
        more = {"prompt_tokens_details": {"cached_tokens": 0}} if nested else {}
        stream += b"".join(others) + done(prompt, completion, **more)
        prompt_tokens += prompt + 4 * others.count(OTHERS[4])
        completion_tokens += completion + 6 * others.count(OTHERS[4])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    pieces = [stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])]
    assert usage_of(*pieces) == (prompt_tokens, completion_tokens)


def test_what_comes_after_the_last_report_is_estimated_until_the_next() -> None:
    session = SessionUsage(Demand("m"), CONTEXT_TOKENS)
    session.heard(10 * AUDIO_SECOND_BYTES)
    session.passed(DELTA * 3)
    assert (session.prompt_tokens, session.completion_tokens) == (125, 3)
    session.passed(done(2, 30))
    assert (session.prompt_tokens, session.completion_tokens) == (2, 30)
    session.heard(AUDIO_SECOND_BYTES)
    session.passed(DELTA)
    assert (session.prompt_tokens, session.completion_tokens) == (2 + 12, 30 + 1)


@pytest.mark.parametrize(("reported", "counted"), [(10**12, CONTEXT_TOKENS), (-1, 0)])
def test_a_report_counts_what_the_model_can_have_used_at_most(reported: int, counted: int) -> None:
    assert usage_of(done(1, reported)) == (1, counted)


def test_bytes_that_only_begin_like_reports_are_not_kept() -> None:
    session = SessionUsage(Demand("m"), CONTEXT_TOKENS)
    for _ in range(100):
        session.passed(b'"usage":' + b"x" * 3000)
    assert len(session._rest) <= 4096
    session.passed(done(1, 2))
    assert (session.prompt_tokens, session.completion_tokens) == (1, 2)
