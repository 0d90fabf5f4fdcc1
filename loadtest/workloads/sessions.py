"""Conversations: each turn's prompt holds all turns before it and what was answered to them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.workloads.prompts import Prompt, Source, Turn
from loadtest.workloads.spec import WorkloadSpec


class SessionSource(Source):
    """Sessions of made-up turns under a system prompt that a group of them shares."""

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
