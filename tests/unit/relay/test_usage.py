import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.relay.sse import read_stream_usage
from gateway.core.relay.upstream import read_usage
from gateway.core.request import Demand, UpstreamResult, Usage

COUNTS = st.integers(0, 10**9)


@given(COUNTS, COUNTS, st.none() | COUNTS, st.sampled_from([0, orjson.OPT_INDENT_2]), st.text(max_size=20))
def test_chat_usage_is_read_back(prompt: int, completion: int, cached: int | None, option: int, text: str) -> None:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 1}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    text = text.encode("utf-8", "replace").decode()
    body = orjson.dumps({"id": "x", "choices": [{"text": f'"usage" {text}'}], "usage": usage}, option=option)
    assert read_usage(body) == Usage(prompt, completion, cached)


@given(COUNTS, COUNTS, COUNTS)
def test_responses_usage_is_read_back(prompt: int, completion: int, cached: int) -> None:
    usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": completion}
    assert read_usage(orjson.dumps({"response": {"usage": usage, "user": None}})) == Usage(prompt, completion, cached)


MESSAGES_USAGE = [
    ({"input_tokens": 9}, Usage(9, 5)),
    ({"input_tokens": 9, "cache_read_input_tokens": 4}, Usage(13, 5, 4)),
    ({"input_tokens": 0, "cache_read_input_tokens": 16}, Usage(16, 5, 16)),
    ({"input_tokens": 3, "cache_creation_input_tokens": 16}, Usage(19, 5)),
    ({"input_tokens": 3, "cache_read_input_tokens": 32, "cache_creation_input_tokens": 16}, Usage(51, 5, 32)),
    ({"input_tokens": 9, "cache_read_input_tokens": None, "cache_creation_input_tokens": None}, Usage(9, 5)),
]


@pytest.mark.parametrize(("input_counts", "usage"), MESSAGES_USAGE)
def test_the_prompt_of_messages_is_all_its_input_cached_or_not(input_counts: dict[str, Any], usage: Usage) -> None:
    counts = {**input_counts, "output_tokens": 5}
    assert read_usage(orjson.dumps({"type": "message", "usage": counts})) == usage
    start = b'event: message_start\ndata: {"message":{"usage":%b}}\n\n'
    delta = b'event: message_delta\ndata: {"delta":{},"usage":%b}\n\n'
    last_only = start % b'{"input_tokens":51,"output_tokens":0}', delta % orjson.dumps(counts)  # as vLLM
    first_only = start % orjson.dumps(input_counts), delta % b'{"output_tokens":5}'  # as Anthropic
    for events in (last_only, first_only):
        assert read_stream_usage(*events) == usage
        assert read_stream_usage(b"".join(events)) == usage


def test_cached_input_is_a_part_of_the_prompt_elsewhere() -> None:
    cached = {"cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}
    chat = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    response = {"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 4}}
    for usage in (chat, response, chat | cached, response | cached):
        assert read_usage(orjson.dumps({"usage": usage})) == Usage(9, 5, 4)


def test_what_a_client_has_named_so_is_no_usage() -> None:
    tools = b'"tools":[{"parameters":{"usage":{"prompt_tokens":1,"input_tokens":1}}}]'
    created = b'event: response.created\ndata: {"response":{"usage":null,%b}}\n\n' % tools
    completed = b'event: x\ndata: {"response":{"usage":{"input_tokens":9,"output_tokens":5},%b}}\n\n' % tools
    assert read_stream_usage(created, completed) == Usage(9, 5)
    assert read_stream_usage(created) is None


def test_the_end_of_an_event_that_was_too_long_is_enough() -> None:
    assert read_stream_usage(b'ing"}],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n') == Usage(3, 4)


def test_the_last_usage_of_a_piece_counts() -> None:
    piece = b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}{"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    assert read_usage(piece) == Usage(1, 2)


def test_a_tail_that_begins_in_the_middle_of_an_answer_is_enough() -> None:
    assert read_usage(b'ing"}],"usage":{"prompt_tokens":3,"completion_tokens":4},"x":1}') == Usage(3, 4)


@pytest.mark.parametrize(
    "piece",
    [b"", b"{}", b'{"usage":null}', b'{"usage":{}}', b'{"usage":5}', b'{"usage":{"prompt_tokens":', b'"usage"',
     b'{"usage":{"prompt_tokens":}}', b'{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}'],
)  # fmt: skip
def test_without_usage_there_is_none(piece: bytes) -> None:
    assert read_usage(piece) is None
    assert read_stream_usage(b"data: " + piece, b"") is None


@pytest.mark.parametrize("value", [None, "5", 1.5, [], True])
def test_counts_that_are_no_numbers_count_as_nothing(value: Any) -> None:
    usage = {"prompt_tokens": value, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": value}}
    assert read_usage(orjson.dumps({"usage": usage})) == Usage(0, 3, None)


@pytest.mark.parametrize("value", [-1, -(2**62), 10**30, 2.0**70])
def test_counts_that_no_engine_can_have_count_as_nothing(value: float) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": value, "prompt_tokens_details": {"cached_tokens": value}}
    assert read_usage(json.dumps({"usage": usage}).encode()) == Usage(3, 0, None)


def test_what_follows_usage_and_is_named_or_called_so_is_passed_over() -> None:
    usage = b'{"usage":{"prompt_tokens":3,"completion_tokens":4}'
    assert read_usage(usage + b',"user":"usage"}') == Usage(3, 4)
    assert read_usage(usage + b'}\n\ndata: {"choices":[{}],"usage":null}\n\n') == Usage(3, 4)


ANY_COUNT = st.integers(0, 2**64) | st.integers(0, 100_000)
ASKS = st.builds(
    Demand, st.just("m"), sequences=st.integers(0, 128), size_bytes=st.integers(0, 10**6),
    learnable_bytes=st.integers(0, 1), pinned=st.none() | st.just("a"),
)  # fmt: skip


def possible(reported: Usage, ask: Demand, context_tokens: int | None) -> Usage:
    answer = UpstreamResult(200, reported, None)
    assert answer.limit_usage(ask, context_tokens) == (answer.usage is reported)
    assert answer.usage is not None
    return answer.usage


@given(ANY_COUNT, ANY_COUNT, st.none() | ANY_COUNT, ASKS, st.none() | st.integers(1, 10**7))
def test_no_request_has_used_more_than_it_could_have(
    prompt: int, completion: int, cached: int | None, ask: Demand, context_tokens: int | None
) -> None:
    reported = Usage(prompt, completion, cached)
    usage = possible(reported, ask, context_tokens)
    most = (context_tokens or 2**20) * max(1, ask.sequences)
    assert 0 <= usage.prompt_tokens <= min(prompt, most)
    assert 0 <= usage.completion_tokens <= min(completion, most)
    assert (usage.cached_tokens is None) == (cached is None)
    assert usage.cached_tokens is None or 0 <= usage.cached_tokens <= usage.prompt_tokens
    assert (usage is reported) == (usage == reported)
    if ask.learnable_bytes and ask.pinned is None:
        assert usage.prompt_tokens <= 4 * ask.size_bytes + 4096 * max(1, ask.sequences)


def test_what_a_request_can_have_used_is_left_as_it_is() -> None:
    reported = Usage(8000, 192, 7984)
    assert possible(reported, Demand("m", size_bytes=1000, learnable_bytes=900), 8192).prompt_tokens == 8000
    assert possible(reported, Demand("m", size_bytes=10), 8192) is reported
    assert possible(Usage(8000, 8192 * 3), Demand("m", size_bytes=10, sequences=2), 8192) == Usage(8000, 8192 * 2)


@pytest.mark.timeout(5)
def test_no_answer_takes_long_to_read() -> None:
    assert read_usage(b'"usage":{' * 100_000) is None
    assert read_usage(b'"usage":{' + b"{}" * 500_000) is None
