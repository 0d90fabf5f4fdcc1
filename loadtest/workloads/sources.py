"""Prompts from files: ShareGPT lengths or conversations, lists of texts, and recorded traces."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from loadtest.workloads.audio import AudioSource
from loadtest.workloads.bodies import BodiesSource, DatasetError, first_body
from loadtest.workloads.prompts import (
    NO_GROUP,
    Prompt,
    PromptSource,
    Source,
    Turn,
    WorkloadKind,
    WorkloadSpec,
    log_uniform,
)
from loadtest.workloads.trace import Row, Trace, TraceError, read_trace

# Fitted to 2,807 first exchanges of ShareGPT V3 in tokens, with the bounds that vLLM's benchmark keeps to. Prompt and
# answer lengths are independent there (the logarithms' correlation is 0.06).
_PROMPT_MEDIAN, _PROMPT_DEVIATION = 40.0, 1.35
_ANSWER_MEDIAN, _ANSWER_DEVIATION = 206.0, 1.02
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


class ShareGptSource(Source):
    """Single questions with made-up words, of lengths that spread as people's do."""

    def turns(self, index: int) -> Sequence[Turn]:
        rng = random.Random(f"{self.spec.seed}-request-{index}")
        prompt_tokens = _lognormal(rng, _PROMPT_MEDIAN, _PROMPT_DEVIATION, _LONGEST_PROMPT)
        answer_tokens = _lognormal(rng, _ANSWER_MEDIAN, _ANSWER_DEVIATION, _LONGEST - prompt_tokens)
        text = self.distinct(f"request {index}", prompt_tokens)
        return (Turn(Prompt(NO_GROUP, prefix="", tail=text, max_tokens=answer_tokens, asked_tokens=prompt_tokens)),)


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
            made.append(
                Turn(
                    Prompt(NO_GROUP, prefix="", tail=text, max_tokens=output_tokens, asked_tokens=asked),
                    pause,
                    remembers=self._whole,
                )
            )
            before = asked + output_tokens
        return made

    def _tokens(self, text: str) -> int:
        if self.tokenizer is not None:
            return max(1, self.tokenizer.count(text))
        return max(1, round(len(text.encode()) / self.spec.bytes_per_token))


def exchanges_of(spec: WorkloadSpec) -> list[list[tuple[str, str]]]:
    """(question, answer) pairs of every conversation that begins with one. Raises DatasetError."""
    if spec.file is None:
        raise DatasetError("no dataset is named")
    path = Path(spec.file.path)
    try:
        conversations = _document(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from None
    if not isinstance(conversations, list):
        raise DatasetError(f"{path}: not a list of conversations")
    found = [pairs for conversation in conversations if (pairs := _pairs(conversation))]
    if not found:
        raise DatasetError(f"{path}: has no conversation in ShareGPT's form, `conversations` of `from` and `value`")
    return found


def _document(text: bytes) -> Any:
    """JSON, or JSON lines as a list."""
    if text.lstrip()[:1] == b"{":
        return [orjson.loads(line) for line in text.splitlines() if line.strip()]
    return orjson.loads(text)


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


def trace_of(spec: WorkloadSpec) -> Trace:
    """The trace that a workload names. Raises TraceError."""
    if spec.file is None:
        raise TraceError("--workload trace: give the file with --trace")
    return read_trace(Path(spec.file.path), spec.block_tokens)


class TraceSource(Source):
    """One conversation a row, or a session of several; the texts are made up, their lengths and repetitions are not."""

    def __init__(self, spec: WorkloadSpec) -> None:
        super().__init__(spec)
        trace = trace_of(spec)
        self._block_tokens = trace.block_tokens
        rng = random.Random(f"{spec.seed}-ticks")
        came = [(rows[0].at_seconds + rng.random() * trace.tick_seconds, rows) for rows in conversations(trace)]
        came.sort(key=itemgetter(0))  # times that were rounded are spread, which changes their order
        self.arrivals_seconds = [at for at, _ in came]
        self._conversations = [rows for _, rows in came]
        self.count = len(came)
        self._warmup_tokens = round(median(row.prompt_tokens for row in trace.rows))

    def turns(self, index: int) -> Iterator[Turn]:
        """A row's prompt holds all that was said before it, so no turn needs the answers of earlier ones."""
        for number, row in enumerate(self._conversations[index]):
            yield Turn(self._prompt(row, f"{index}-{number}"), row.think_seconds)

    def warmup(self, index: int) -> Prompt:
        """As long as the usual prompt of the trace."""
        return Prompt(
            NO_GROUP,
            prefix="",
            tail=self.distinct(f"warm-up {index}", self._warmup_tokens),
            max_tokens=self.spec.max_tokens,
        )

    def _prompt(self, row: Row, label: str) -> Prompt:
        own_tokens = row.prompt_tokens - len(row.keys) * self._block_tokens
        own = self.distinct(f"request {label}", own_tokens) if own_tokens else ""
        text = "".join(self._block(key) for key in row.keys) + own
        group = row.keys[0] if row.keys else NO_GROUP
        return Prompt(group, prefix="", tail=text, max_tokens=row.output_tokens, asked_tokens=row.prompt_tokens)

    def _block(self, key: int) -> str:
        rng = random.Random(f"{self.spec.seed}-block-{key}")
        return self._headed(f"{key:x}: ", rng, self._block_tokens)


def conversations(trace: Trace) -> list[list[Row]]:
    """Rows of one session together, in order of the sessions' starts; a row without a session is alone."""
    if not trace.sessions:
        return [[row] for row in trace.rows]
    rows = sorted(trace.rows, key=lambda row: row.session or 0)
    found = [list(turns) for _, turns in groupby(rows, key=lambda row: row.session)]
    return sorted(found, key=lambda turns: turns[0].at_seconds)


class SessionSource(Source):
    """Sessions of made-up turns under a system prompt that a group of them shares.

    Each turn's prompt holds all turns before it and the answers to them.
    """

    def __init__(self, spec: WorkloadSpec) -> None:
        super().__init__(spec)
        self._systems = [self.distinct(f"topic {group}", spec.prefix_tokens) for group in range(spec.groups)]

    def turns(self, index: int) -> Sequence[Turn]:
        """As many turns as the session's lot says; people's pauses have an exponential spread."""
        spec = self.spec
        rng = random.Random(f"{spec.seed}-session-{index}")
        group = rng.randrange(spec.groups)
        before, made = spec.prefix_tokens, list[Turn]()
        for number in range(rng.randint(*spec.turns)):
            output_tokens, tail_tokens = self.output_length(rng), self.tail_length(rng)
            text = self.distinct(f"session {index} turn {number}", tail_tokens)
            asked = before + tail_tokens
            pause = rng.expovariate(1 / spec.think_seconds) if number and spec.think_seconds else 0.0
            prompt = Prompt(group, prefix=self._systems[group], tail=text, max_tokens=output_tokens, asked_tokens=asked)
            made.append(Turn(prompt, pause, remembers=True))
            before = asked + output_tokens
        return made


class TextsSource(Source):
    """Requests of several texts each. Small lists are as likely as large ones: numbers are even in their logarithm."""

    def turns(self, index: int) -> Sequence[Turn]:
        spec = self.spec
        low, high = spec.inputs
        rng = random.Random(f"{spec.seed}-request-{index}")
        lengths = [self.tail_length(rng) for _ in range(log_uniform(rng, low, high))]
        texts = tuple(self.distinct(f"text {index}-{number}", tokens) for number, tokens in enumerate(lengths))
        return (
            Turn(Prompt(NO_GROUP, prefix="", tail=texts[0], max_tokens=0, asked_tokens=sum(lengths), inputs=texts)),
        )


def source_of(spec: WorkloadSpec) -> Source:
    """The source of a workload's prompts. Reads the file that the workload names, if it names one."""
    match spec.kind:
        case WorkloadKind.TRACE:
            return TraceSource(spec)
        case WorkloadKind.SESSIONS:
            if spec.file is None:
                return SessionSource(spec)
            if first_body(Path(spec.file.path)) is not None:
                return BodiesSource(spec, split=True)
            return DatasetSource(spec, whole=True)
        case WorkloadKind.BODIES:
            return BodiesSource(spec)
        case WorkloadKind.SHAREGPT:
            return ShareGptSource(spec) if spec.file is None else DatasetSource(spec, whole=False)
        case WorkloadKind.TEXTS:
            return TextsSource(spec)
        case WorkloadKind.AUDIO:
            return AudioSource(spec)
        case _:
            return PromptSource(spec)
