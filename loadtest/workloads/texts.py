"""Lists of texts, as embeddings are asked for."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from loadtest.workloads.prompts import NO_GROUP, Prompt, Source, Turn


class TextsSource(Source):
    """Requests of several texts each. Small lists are as likely as large ones: numbers are even in their logarithm."""

    def turns(self, index: int) -> Sequence[Turn]:
        """One request."""
        spec = self.spec
        low, high = spec.inputs
        rng = random.Random(f"{spec.seed}-request-{index}")
        count = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
        texts = tuple(self.distinct(f"text {index}-{number}", spec.tail_tokens) for number in range(count))
        return (Turn(Prompt(NO_GROUP, "", texts[0], 0, count * spec.tail_tokens, inputs=texts)),)
