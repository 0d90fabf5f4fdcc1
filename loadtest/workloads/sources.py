"""Sources of prompts: conversations, lists of texts, and which source a workload has."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from loadtest.workloads.prompts import NO_GROUP, Prompt, PromptSource, Source, Turn
from loadtest.workloads.recorded import TraceSource
from loadtest.workloads.sharegpt import DatasetSource, ShareGptSource
from loadtest.workloads.spec import WorkloadKind, WorkloadSpec


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
            text = self.distinct(f"session {index} turn {number}", spec.tail_tokens)
            asked, output_tokens = before + spec.tail_tokens, self.output_length(rng)
            pause = rng.expovariate(1 / spec.think_seconds) if number and spec.think_seconds else 0.0
            prompt = Prompt(group, self._systems[group], text, output_tokens, asked)
            made.append(Turn(prompt, pause, remembers=True))
            before = asked + output_tokens
        return made


class TextsSource(Source):
    """Requests of several texts each. Small lists are as likely as large ones: numbers are even in their logarithm."""

    def turns(self, index: int) -> Sequence[Turn]:
        spec = self.spec
        low, high = spec.inputs
        rng = random.Random(f"{spec.seed}-request-{index}")
        count = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
        texts = tuple(self.distinct(f"text {index}-{number}", spec.tail_tokens) for number in range(count))
        return (Turn(Prompt(NO_GROUP, "", texts[0], 0, count * spec.tail_tokens, inputs=texts)),)


def source_of(spec: WorkloadSpec) -> Source:
    """The source of a workload's prompts. Reads the file that the workload names, if it names one."""
    match spec.kind:
        case WorkloadKind.TRACE:
            return TraceSource(spec)
        case WorkloadKind.SESSIONS:
            return SessionSource(spec) if spec.file is None else DatasetSource(spec, whole=True)
        case WorkloadKind.SHAREGPT:
            return ShareGptSource(spec) if spec.file is None else DatasetSource(spec, whole=False)
        case WorkloadKind.TEXTS:
            return TextsSource(spec)
        case _:
            return PromptSource(spec)
