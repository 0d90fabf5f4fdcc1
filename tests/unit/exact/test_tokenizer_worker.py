import io
import signal
import subprocess
import sys
from array import array
from typing import Any

import pytest

from gateway.features.exact.conversation import PromptFeature
from gateway.features.exact.tokenizer import (
    LENGTH_BYTES,
    Count,
    Job,
    LoadTokenizer,
    Question,
    TokenizerReply,
    Worker,
    framed,
    length_of,
    read_answer,
    serve,
)
from tests.unit.exact.fake_worker import Letters

EVERY = [feature.value for feature in PromptFeature]


def worker() -> Worker:
    made = Worker(Letters)  # type: ignore[arg-type]
    assert made.answer(LoadTokenizer("m", "somewhere")).tokens is not None
    return made


def completion(prompt: str, model: str = "m") -> Job:
    return Job(model, "completions", {"prompt": prompt}, "string", EVERY)


def answers_in(stream: bytes) -> list[TokenizerReply]:
    found = []
    while stream:
        end = LENGTH_BYTES + length_of(stream[:LENGTH_BYTES])
        found.append(read_answer(stream[LENGTH_BYTES:end]))
        stream = stream[end:]
    return found


def test_a_prompt_is_answered_with_its_tokens() -> None:
    expected = TokenizerReply(array("I", map(ord, "Hi")).tobytes())
    assert worker().answer(completion("Hi")) == expected


@pytest.mark.parametrize(("special", "counts"), [(True, [4, 2]), (False, [2, 0])])
def test_the_tokens_of_texts_are_counted(special: bool, counts: list[int]) -> None:
    answer = worker().answer(Count("m", ["Hi", ""], special))
    assert answer == TokenizerReply(b"", counts=counts)


@pytest.mark.parametrize(
    ("job", "reason", "failed"),
    [
        (Count("other", ["Hi"], True), "the tokenizer of other is not loaded", True),
        (Count("m", ["Hi", "#fails"], True), "RuntimeError: on purpose", True),
        (completion("Hi", model="other"), "the tokenizer of other is not loaded", True),
        (completion("#fails"), "RuntimeError: on purpose", True),
        (
            Job("m", "chat", {"messages": []}, "string", EVERY),
            "Expected `array` of length >= 1 - at `$.messages`",
            False,
        ),
        (Job("m", "completions", {"prompt": "Hi"}, "string", []), "a feature too many", False),
    ],
)
def test_an_unsupported_prompt_is_answered_too(job: Question, reason: str, failed: bool) -> None:
    answer = worker().answer(job)
    assert (answer.tokens, answer.reason, answer.failed) == (None, reason, failed)


def test_a_tokenizer_that_is_not_there_is_an_answer_too() -> None:
    answer = Worker(Letters).answer(LoadTokenizer("m", "missing"))  # type: ignore[arg-type]
    assert (answer.tokens, answer.reason, answer.failed) == (None, "missing cannot be loaded", True)


@pytest.mark.parametrize("rest", [b"", b"\x05", b"\x05\x00\x00"])
def test_questions_are_answered_in_turn_until_they_end(rest: bytes) -> None:
    questions = b"".join(map(framed, (LoadTokenizer("m", "x"), completion("a"), completion("b"))))
    sink = io.BytesIO()
    serve(io.BytesIO(questions + rest), sink, Worker(Letters).answer)  # type: ignore[arg-type]
    tokens = [answer.tokens for answer in answers_in(sink.getvalue())]
    assert tokens == [b"", *(array("I", [ord(letter)]).tobytes() for letter in "ab")]


def test_the_process_returns_a_real_tokenizers_tokens_and_ignores_signals(folder: str) -> None:
    document: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    load, job = framed(LoadTokenizer("m", folder)), framed(Job("m", "chat", document, "string", EVERY))
    command = [sys.executable, "-m", "gateway.features.exact.tokenizer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(load)
        process.stdin.flush()
        first = process.stdout.read(LENGTH_BYTES)
        first += process.stdout.read(length_of(first))
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.stdin.write(job)
        process.stdin.close()
        answers = answers_in(first + process.stdout.read())
    assert answers[0].tokens == b"", answers[0].reason
    assert answers[1].tokens, answers[1].reason
    assert process.returncode == 0
