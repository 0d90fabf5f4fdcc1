"""Which lines may be cut and continued, and what their requests look like then."""

from typing import Any

import orjson
import pytest

from gateway.features.batches.continuation import can_continue, continued_fields, saves_work, streamed
from gateway.features.batches.partial import PartialAnswer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONVERSATION: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi", "max_tokens": 9}


def cut_after(prompt: list[int], said: list[int], *, is_chat: bool) -> PartialAnswer:
    partial = PartialAnswer("m", is_chat=is_chat)
    for number, token in enumerate(said):
        text = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
        first = {"prompt_token_ids": prompt if not number else None}
        choice = {"token_ids": [token], **text, **({} if is_chat else first)}
        partial.feed(b"data: %b\n\n" % orjson.dumps({"choices": [choice], **(first if is_chat else {})}))
    assert partial.cut()
    return partial


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0, "top_p": 0.9, "stop_token_ids": [7], "ignore_eos": True},
        {"n": 1, "stop": None, "logprobs": False, "tools": [], "presence_penalty": 0.0, "stream": False},
        {"response_format": {"type": "text"}, "repetition_penalty": 1.0},
    ],
)
def test_plain_lines_can_be_continued(more: dict[str, Any]) -> None:
    assert can_continue(CHAT, {**CONVERSATION, **more})
    assert can_continue(COMPLETIONS, {**COMPLETION, **more})
    assert can_continue(COMPLETIONS, {**COMPLETION, "prompt": [1, 2], **more})


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": True},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"stop": "x"},
        {"stop": ["x"]},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {}}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"seed": 7},
        {"echo": True},
        {"return_token_ids": True},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": 5},
        {"vllm_xargs": {"a": 1}},
        {"max_tokens": None},
        {"a_field_that_nobody_knows": 1},
    ],
)
def test_what_an_answer_alone_decides_cannot_be_continued(more: dict[str, Any]) -> None:
    assert not can_continue(CHAT, {**CONVERSATION, **more})
    assert not can_continue(COMPLETIONS, {**COMPLETION, **more})


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
        [{"role": "user"}],
        "Hi",
        None,
    ],
)
def test_of_conversations_only_those_of_text_can_be_continued(messages: Any) -> None:
    assert not can_continue(CHAT, {**CONVERSATION, "messages": messages})


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [], None, [1, "a"]])
def test_of_prompts_only_single_ones_can_be_continued(prompt: Any) -> None:
    assert not can_continue(COMPLETIONS, {**COMPLETION, "prompt": prompt})


def test_other_endpoints_have_no_answer_that_can_be_continued() -> None:
    assert not can_continue("/v1/responses", {"model": "m", "input": "Hi", "max_tokens": 9})


def test_short_answers_are_not_worth_a_stream() -> None:
    assert not saves_work(CONVERSATION)
    assert saves_work({**CONVERSATION, "max_tokens": 32})
    assert saves_work({**CONVERSATION, "max_completion_tokens": 400})


@pytest.mark.parametrize("more", [{}, {"stream": False, "stream_options": None}])
def test_a_line_is_streamed_with_token_ids_and_usage(more: dict[str, Any]) -> None:
    document = {**CONVERSATION, **more}
    fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert orjson.loads(streamed(orjson.dumps(document), document)) == {**document, **fields}


def test_a_chat_goes_on_from_the_token_ids_beside_its_messages() -> None:
    document = {**CONVERSATION, "min_tokens": 1, "max_completion_tokens": 5}
    assert continued_fields(document, cut_after([1, 2], [3, 4], is_chat=True)) == {
        "kv_transfer_params": {"prompt_token_ids": [1, 2, 3, 4]},
        "max_completion_tokens": 3,
        "max_tokens": 7,
        "min_tokens": 0,
    }


def test_a_completion_goes_on_with_the_token_ids_as_its_prompt() -> None:
    partial = cut_after([1, 2], [3], is_chat=False)
    assert continued_fields(COMPLETION, partial) == {"prompt": [1, 2, 3], "max_tokens": 8}
