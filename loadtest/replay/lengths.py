"""What is changed of a trace's lengths, and what the gateway is told of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Answers are `output_times` as long as recorded. Clients state `max_tokens_times` what they will get as
    `max_tokens`, or nothing. The gateway misjudges prompts by a factor whose logarithm has the deviation `misjudged`.
    """

    output_times: float = 1.0
    max_tokens_times: float | None = None
    misjudged: float = 0.0

    def output_tokens(self, recorded: int) -> int:
        return max(1, round(recorded * self.output_times))

    def max_tokens(self, output_tokens: int) -> int | None:
        """What the client of such an answer states."""
        times = self.max_tokens_times
        return None if times is None else max(output_tokens, math.ceil(output_tokens * times))

    def believed_tokens(self, prompt_tokens: int, number: int) -> int:
        """What the gateway takes the prompt of that request for."""
        if not self.misjudged:
            return prompt_tokens
        return max(1, round(prompt_tokens * math.exp(random.Random(number).gauss(0.0, self.misjudged))))
