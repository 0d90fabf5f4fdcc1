import pytest

from gateway.features.exact.tokenizer import (
    LENGTH_BYTES,
    Count,
    Job,
    LoadTokenizer,
    Question,
    TokenizerReply,
    framed,
    length_of,
    read_answer,
    read_question,
)


@pytest.mark.parametrize(
    "question",
    [
        LoadTokenizer("m", "/models/m"),
        Job(
            "m",
            "chat",
            document={"messages": [{"role": "user", "content": "ž"}], "n": None, "x": 1.5},
            content_format="string",
            features=["chat"],
        ),
        Count("m", ["ž", ""], False),
    ],
)
def test_a_question_arrives_as_it_was_sent(question: Question) -> None:
    message = framed(question)
    assert length_of(message[:LENGTH_BYTES]) == len(message) - LENGTH_BYTES
    assert read_question(message[LENGTH_BYTES:]) == question


def test_an_answer_arrives_as_it_was_sent() -> None:
    answer = TokenizerReply(b"\x00\x01", failed=True, counts=[2, 0])
    assert read_answer(framed(answer)[LENGTH_BYTES:]) == answer


def test_a_number_too_large_for_the_format_fails_before_it_is_sent() -> None:
    with pytest.raises(OverflowError):
        framed(Job("m", "chat", {"x": 1 << 70}, "string", []))
