import io
import signal
import subprocess
import sys
from array import array
from typing import Any

import pytest

from gateway.tokenization.conversation import Feature
from gateway.tokenization.process import (
    LENGTH_BYTES,
    Count,
    Job,
    LoadTokenizer,
    Question,
    TokenizerReply,
    framed,
    length_of,
    read_answer,
)
from gateway.tokenization.tokenizer import Worker, serve
from tests.unit.tokenization.fake_worker import Letters

EVERY = [feature.value for feature in Feature]


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def worker() -> Worker:
    made = Worker(Letters, Ticks())  # type: ignore[arg-type]
    assert made.answer(LoadTokenizer(1, "m", "somewhere")).tokens is not None
    return made


def completion(number: int, prompt: str, model: str = "m") -> Job:
    return Job(number, model, "completions", {"prompt": prompt}, "string", EVERY)


def answers_in(stream: bytes) -> list[TokenizerReply]:
    found = []
    while stream:
        end = LENGTH_BYTES + length_of(stream[:LENGTH_BYTES])
        found.append(read_answer(stream[LENGTH_BYTES:end]))
        stream = stream[end:]
    return found


def test_a_prompts_tokens_come_with_what_they_cost() -> None:
    expected = TokenizerReply(7, array("I", map(ord, "Hi")).tobytes(), seconds=1.0, segments=2, cached_segments=1)
    assert worker().answer(completion(7, "Hi")) == expected


@pytest.mark.parametrize(("special", "counts"), [(True, [4, 2]), (False, [2, 0])])
def test_the_tokens_of_texts_are_counted(special: bool, counts: list[int]) -> None:
    answer = worker().answer(Count(7, "m", ["Hi", ""], special))
    assert answer == TokenizerReply(7, b"", seconds=1.0, counts=counts)


@pytest.mark.parametrize(
    ("job", "reason", "failed"),
    [
        (Count(1, "other", ["Hi"], True), "the tokenizer of other is not loaded", True),
        (Count(1, "m", ["Hi", "#fails"], True), "RuntimeError: on purpose", True),
        (completion(1, "Hi", model="other"), "the tokenizer of other is not loaded", True),
        (completion(1, "#fails"), "RuntimeError: on purpose", True),
        (Job(1, "m", "chat", {"messages": []}, "string", EVERY), "there are no messages", False),
        (Job(1, "m", "completions", {"prompt": "Hi"}, "string", []), "a feature too many", False),
    ],
)
def test_an_unsupported_prompt_is_answered_too(job: Question, reason: str, failed: bool) -> None:
    answer = worker().answer(job)
    assert (answer.tokens, answer.reason, answer.failed) == (None, reason, failed)


def test_a_tokenizer_that_is_not_there_is_an_answer_too() -> None:
    answer = Worker(Letters, Ticks()).answer(LoadTokenizer(1, "m", "missing"))  # type: ignore[arg-type]
    assert (answer.tokens, answer.reason, answer.failed) == (None, "missing cannot be loaded", True)


@pytest.mark.parametrize("rest", [b"", b"\x05", b"\x05\x00\x00"])
def test_questions_are_answered_in_turn_until_they_end(rest: bytes) -> None:
    questions = b"".join(map(framed, (LoadTokenizer(1, "m", "x"), completion(2, "a"), completion(3, "b"))))
    sink = io.BytesIO()
    serve(io.BytesIO(questions + rest), sink, Worker(Letters, Ticks()))  # type: ignore[arg-type]
    assert [answer.number for answer in answers_in(sink.getvalue())] == [1, 2, 3]


def test_the_process_returns_a_real_tokenizers_tokens_and_ignores_signals(folder: str) -> None:
    document: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    load, job = framed(LoadTokenizer(1, "m", folder)), framed(Job(2, "m", "chat", document, "string", EVERY))
    command = [sys.executable, "-m", "gateway.tokenization.tokenizer"]
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
