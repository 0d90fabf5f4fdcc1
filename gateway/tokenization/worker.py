"""The tokenizer process: answers questions on its standard input, one after the other, until that ends."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import BinaryIO, Final

from gateway.tokenization.conversation import NotUnderstood
from gateway.tokenization.process import (
    LENGTH_BYTES,
    Count,
    Job,
    LoadTokenizer,
    Question,
    TokenizerReply,
    framed,
    length_of,
    read_question,
)
from gateway.tokenization.tokenizer import CannotLoad, ModelTokenizer

CACHE_BYTES: Final = 67108864  # for each model


class Worker:
    """The models' tokenizers."""

    def __init__(self, load: Callable[[str, int], ModelTokenizer], clock: Callable[[], float]) -> None:
        self._load = load
        self._clock = clock
        self._models: dict[str, ModelTokenizer] = {}

    def answer(self, question: Question) -> TokenizerReply:
        """Load a tokenizer, or tell tokens."""
        started = self._clock()
        try:
            if isinstance(question, LoadTokenizer):
                self._models[question.model] = model = self._load(question.source, CACHE_BYTES)
                told = "in segments" if model.segmented else "as a whole"
                return TokenizerReply(question.number, b"", told, seconds=self._clock() - started)
            if isinstance(question, Count):
                return self._counts(question, started)
            return self._tokens(question, started)
        except (CannotLoad, NotUnderstood) as error:
            return TokenizerReply(
                question.number, None, str(error), isinstance(error, CannotLoad), self._clock() - started
            )
        except Exception as error:  # one prompt's fault must not end the others' service
            return TokenizerReply(
                question.number, None, f"{type(error).__name__}: {error}", True, self._clock() - started
            )

    def _tokens(self, job: Job, started: float) -> TokenizerReply:
        model = self._model(job.model)
        segments = model.segments
        seen, cached = segments.seen, segments.cached
        tokens = model.tokens(job.endpoint, job.document, job.content_format, job.features)
        spent = self._clock() - started
        return TokenizerReply(
            job.number, tokens, seconds=spent, segments=segments.seen - seen, cached_segments=segments.cached - cached
        )

    def _counts(self, question: Count, started: float) -> TokenizerReply:
        counts = self._model(question.model).counts(question.texts, special=question.special)
        return TokenizerReply(question.number, b"", seconds=self._clock() - started, counts=counts)

    def _model(self, name: str) -> ModelTokenizer:
        model = self._models.get(name)
        if model is None:
            raise CannotLoad(f"the tokenizer of {name} is not loaded")
        return model


def serve(questions: BinaryIO, answers: BinaryIO, worker: Worker) -> None:
    while len(prefix := questions.read(LENGTH_BYTES)) == LENGTH_BYTES:
        body = questions.read(length_of(prefix))
        answers.write(framed(worker.answer(read_question(body))))
        answers.flush()


def main() -> None:
    """Serve the gateway that started this process. Whatever prints to standard output prints to standard error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is the gateway that ends this process, by closing its input
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb") as questions, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(sys.stderr.fileno(), 1)
        serve(questions, answers, Worker(ModelTokenizer, time.monotonic))


if __name__ == "__main__":
    main()
