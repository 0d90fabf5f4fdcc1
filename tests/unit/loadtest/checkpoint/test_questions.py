"""What servers answer, read strictly."""

import pytest

from loadtest.checkpoint.questions import Question, least_cosine, streamed, whole
from loadtest.workloads.prompts import Endpoint

_A = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
_B = b'data: {"choices": [{"delta": {"content": "one"}}]}\n\ndata: {"choices": [{"delta": {"content": " two"}}]}\n\n'
_USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n'
_DONE = b"data: [DONE]\n\n"


def test_a_stream_says_its_text_its_usage_and_that_it_ended_well() -> None:
    said = streamed(_A + _B + _USAGE + _DONE, "a")
    assert (said.text, said.usage, said.ended, said.error, said.backend) == ("one two", "5 + 2 tokens", "", "", "a")


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        (_A + _B + _USAGE, "0 times [DONE]"),
        (_A + _B + _USAGE + _DONE + _DONE, "2 times [DONE]"),
        (_A + _B + _DONE + _USAGE, "after [DONE]: data: {"),
    ],
)
def test_an_end_that_is_missing_doubled_or_not_the_last_is_reported(body: bytes, ended: str) -> None:
    assert streamed(body).ended.startswith(ended)


def test_an_error_event_is_an_error() -> None:
    assert "engine died" in streamed(_A + b'data: {"error": {"message": "engine died"}}\n\n').error


def test_a_whole_answer_holds_thoughts_and_text() -> None:
    message = b'{"choices": [{"message": {"reasoning": "hm ", "content": "yes"}}], "usage": {"prompt_tokens": 3}}'
    assert whole(message).text == "hm yes"
    assert whole(b'{"choices": [{"text": "yes"}]}').text == "yes"
    assert whole(b"<html>").error.startswith("no answer")
    assert whole(b'{"choices": []}').error.startswith("no answer")


def test_vectors_are_compared_pair_by_pair() -> None:
    one, other = [1.0, 0.0], [0.0, 2.0]
    assert least_cosine([one, other], [[2.0, 0.0], [0.0, 1.0]]) == pytest.approx(1.0)
    assert least_cosine([one, other], [other, one]) == pytest.approx(0.0)
    for theirs in ([one], [], [one, [1.0]], [one, [0.0, 0.0]]):
        assert least_cosine([one, other], theirs) == -1.0


def test_a_question_is_greedy_whatever_the_run_sends_besides() -> None:
    question = Question(
        "m", Endpoint.CHAT, {"temperature": 1, "chat_template_kwargs": {"x": 1}}, new_salt=lambda: "salt"
    )
    body = question.body(stream=True)
    assert (body["temperature"], body["chat_template_kwargs"], body["cache_salt"]) == (0, {"x": 1}, "salt")
    assert body["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in Question("m", Endpoint.COMPLETIONS, {}).body(stream=False)
