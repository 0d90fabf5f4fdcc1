"""The comparison sees what it must see and overlooks what may differ."""

import json

import pytest

from tests.contract.recording import load
from tests.contract.shape import answer_shape, event_shape, header_shape, shape, stream_shape


def test_texts_numbers_and_ids_may_differ() -> None:
    one = {"id": "a", "created": 1, "choices": [{"index": 0, "text": "x"}]}
    other = {"id": "b", "created": 2, "choices": [{"index": 0, "text": "y"}]}
    assert shape(one) == shape(other)


@pytest.mark.parametrize(
    "other",
    [
        {"object": "list", "code": 404, "usage": {}, "extra": None},
        {"object": "list", "code": 404},
        {"object": "model", "code": 404, "usage": {}},
        {"object": "list", "code": 400, "usage": {}},
        {"object": "list", "code": "404", "usage": {}},
        {"object": "list", "code": 404, "usage": None},
    ],
)
def test_keys_types_and_protocol_words_may_not_differ(other: dict[str, object]) -> None:
    assert shape(other) != shape({"object": "list", "code": 404, "usage": {}})


def chunk(index: int, finish: str | None = None) -> str:
    """A completion's event."""
    return f'data: {{"choices": [{{"index": {index}, "text": "a", "finish_reason": {json.dumps(finish)}}}]}}'


def test_how_many_equal_events_there_are_does_not_matter_but_their_order_does() -> None:
    token, last, done = chunk(0), chunk(0, "stop"), "data: [DONE]"
    assert stream_shape([token, token, last, done]) == stream_shape([token, last, done])
    assert stream_shape([last, token, done]) != stream_shape([token, last, done])
    assert stream_shape([token, last]) != stream_shape([token, last, done])


def test_how_choices_interleave_does_not_matter_but_what_each_one_gets_does() -> None:
    apart = [chunk(0), chunk(0, "stop"), chunk(1), chunk(1, "length")]
    mixed = [chunk(0), chunk(1), chunk(1, "length"), chunk(0, "stop")]
    assert stream_shape(apart) == stream_shape(mixed)
    assert stream_shape(apart) != stream_shape([*mixed[:2], chunk(1, "stop"), mixed[3]])


def test_named_events_are_told_apart() -> None:
    assert event_shape("event: message_start\ndata: {}") != event_shape("event: message_stop\ndata: {}")


def test_framing_and_content_type_count_but_the_server_name_does_not() -> None:
    plain = [("server", "uvicorn"), ("content-length", "2"), ("content-type", "application/json")]
    assert header_shape(plain) == header_shape([("Content-Length", "9"), ("Content-Type", "application/json")])
    assert header_shape(plain) != header_shape([("transfer-encoding", "chunked"), ("content-type", "application/json")])
    assert header_shape(plain) != header_shape([*plain, ("x-request-id", "1")])


def test_recorded_answers_of_one_kind_have_one_shape_and_of_two_kinds_have_two() -> None:
    assert answer_shape(load("chat")) == answer_shape(load("chat_request_id"))
    assert answer_shape(load("chat_stream")) != answer_shape(load("chat_stream_usage"))
    assert answer_shape(load("error_chat_unknown_model")) != answer_shape(load("error_bad_json"))
