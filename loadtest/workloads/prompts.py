"""Prompts by index: the same seed and index give the same prompt in any process, so workers can share a workload."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.workloads.spec import WorkloadKind, WorkloadSpec
from loadtest.workloads.text import Corpus

NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: what its group shares (may be empty), then what is its own, and how long its answer is to be."""

    group: int
    prefix: str
    tail: str
    max_tokens: int


class PromptSource:
    """Every prompt of a workload, and warm-up prompts whose first bytes differ from all of them."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        self._corpus = Corpus(spec.seed)
        groups = spec.groups if spec.kind is WorkloadKind.SHARED_PREFIX else 0
        self._prefixes = [self._distinct(f"topic {group}", spec.prefix_tokens) for group in range(groups)]

    def prompt(self, index: int) -> Prompt:
        """The prompt of request `index`; its group is drawn uniformly."""
        rng = random.Random(f"{self._spec.seed}-request-{index}")
        tail, max_tokens = self._distinct(f"request {index}", self._spec.tail_tokens), self._output_length(rng)
        if not self._prefixes:
            return Prompt(NO_GROUP, "", tail, max_tokens)
        group = rng.randrange(len(self._prefixes))
        return Prompt(group, self._prefixes[group], tail, max_tokens)

    def warmup(self, index: int) -> Prompt:
        """A prompt of the same size that shares its first block with no measured prompt and no other warm-up."""
        text = self._distinct(f"warm-up {index}", self._spec.prompt_tokens)
        return Prompt(NO_GROUP, "", text, self._spec.max_tokens)

    def _output_length(self, rng: random.Random) -> int:
        """Even around the asked length: equal lengths would keep the users of a closed loop in step for ever."""
        spread = self._spec.output_spread
        return max(1, round(self._spec.max_tokens * rng.uniform(1 - spread, 1 + spread)))

    def _distinct(self, label: str, tokens: int) -> str:
        """Prose that is unlike any other label's from its first bytes on: prefix caches match from the start."""
        rng = random.Random(f"{self._spec.seed}-{label}")
        head = f"{rng.getrandbits(48):012x} {label}: "
        length_bytes = max(len(head), round(tokens * self._spec.bytes_per_token))
        return head + self._corpus.slice(rng, length_bytes - len(head))
