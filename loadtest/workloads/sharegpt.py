"""Requests as people ask them: lengths as in ShareGPT, or the conversations of such a file."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from loadtest.workloads.prompts import NO_GROUP, Prompt, Source, Turn
from loadtest.workloads.spec import WorkloadSpec

# Fitted to 2,807 first exchanges of ShareGPT V3 in tokens, with the bounds that vLLM's benchmark keeps to. Prompt and
# answer lengths are independent there (the logarithms' correlation is 0.06).
_PROMPT_MEDIAN, _PROMPT_DEVIATION = 40.0, 1.35
_ANSWER_MEDIAN, _ANSWER_DEVIATION = 206.0, 1.02
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


class DatasetError(Exception):
    """A dataset that cannot be used; the message names the file."""


class ShareGptSource(Source):
    """Single questions with made-up words, of lengths that spread as people's do."""

    def turns(self, index: int) -> Sequence[Turn]:
        rng = random.Random(f"{self.spec.seed}-request-{index}")
        prompt_tokens = _lognormal(rng, _PROMPT_MEDIAN, _PROMPT_DEVIATION, _LONGEST_PROMPT)
        answer_tokens = _lognormal(rng, _ANSWER_MEDIAN, _ANSWER_DEVIATION, _LONGEST - prompt_tokens)
        text = self.distinct(f"request {index}", prompt_tokens)
        return (Turn(Prompt(NO_GROUP, "", text, answer_tokens, prompt_tokens)),)


class DatasetSource(Source):
    """The questions of a ShareGPT file in an order that the seed draws; answers become as long as those in the file.

    `whole` sends all turns of a conversation, with the answers that the server gave. A file that is used up begins
    again, with a word in front that keeps the caches of the round before from helping.
    """

    def __init__(self, spec: WorkloadSpec, *, whole: bool) -> None:
        super().__init__(spec)
        self._whole = whole
        self._exchanges = exchanges_of(spec)
        self._order = random.Random(f"{spec.seed}-order").sample(range(len(self._exchanges)), len(self._exchanges))

    def turns(self, index: int) -> Sequence[Turn]:
        """The first exchange of a conversation, or all of them."""
        spec = self.spec
        round_, place = divmod(index, len(self._order))
        exchanges = self._exchanges[self._order[place]]
        rng = random.Random(f"{spec.seed}-session-{index}")
        before, made = 0, list[Turn]()
        for number, (question, answer) in enumerate(exchanges if self._whole else exchanges[:1]):
            text = f"{round_ + 1}. {question}" if round_ and not number else question
            asked, output_tokens = before + self._tokens(text), self._tokens(answer)
            pause = rng.expovariate(1 / spec.think_seconds) if number and spec.think_seconds else 0.0
            made.append(Turn(Prompt(NO_GROUP, "", text, output_tokens, asked), pause, remembers=self._whole))
            before = asked + output_tokens
        return made

    def _tokens(self, text: str) -> int:
        return max(1, round(len(text.encode()) / self.spec.bytes_per_token))


def exchanges_of(spec: WorkloadSpec) -> list[list[tuple[str, str]]]:
    """(question, answer) pairs of every conversation that begins with one. Raises DatasetError."""
    if spec.file is None:
        raise DatasetError("no dataset is named")
    path = Path(spec.file.path)
    try:
        conversations = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from None
    if not isinstance(conversations, list):
        raise DatasetError(f"{path}: not a list of conversations")
    found = [pairs for conversation in conversations if (pairs := _pairs(conversation))]
    if not found:
        raise DatasetError(f"{path}: has no conversation in ShareGPT's form, `conversations` of `from` and `value`")
    return found


def _pairs(conversation: Any) -> list[tuple[str, str]]:
    messages = conversation.get("conversations") if isinstance(conversation, dict) else None
    pairs: list[tuple[str, str]] = []
    for question, answer in zip((messages or [])[::2], (messages or [])[1::2], strict=False):
        if _said_by(question) not in ("human", "user") or _said_by(answer) not in ("gpt", "assistant", "chatgpt"):
            break
        if not question.get("value") or not answer.get("value"):
            break
        pairs.append((str(question["value"]), str(answer["value"])))
    return pairs


def _said_by(message: Any) -> object:
    return message.get("from") if isinstance(message, dict) else None


def _lognormal(rng: random.Random, median: float, deviation: float, longest: int) -> int:
    """Drawn again until it is within the bounds, as the fit left out what is not."""
    while True:
        tokens = round(rng.lognormvariate(math.log(median), deviation))
        if _SHORTEST <= tokens <= longest:
            return tokens
