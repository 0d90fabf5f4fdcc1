"""Prompts by index: the same seed and index give the same prompt in any process, so workers can share a workload."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from loadtest.workloads.spec import WorkloadKind, WorkloadSpec
from loadtest.workloads.text import Corpus

NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: what its group shares (may be empty), then what is its own, and how long its answer is to be.

    `asked_tokens` is its length as planned; `history` is what was said between prefix and tail, in turns of user and
    assistant; `inputs` are those of an embeddings request that has several.
    """

    group: int
    prefix: str
    tail: str
    max_tokens: int
    asked_tokens: int = 0
    history: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def after(self, history: tuple[str, ...]) -> Prompt:
        """The same as the next turn of a conversation."""
        return replace(self, history=history) if history else self


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, sent so long after the answer before it, with what was said or without."""

    prompt: Prompt
    pause_seconds: float = 0.0
    remembers: bool = False


class Source(ABC):
    """Every conversation of a workload, many of one turn, and prompts to warm up with that share no prefix with any.

    `count` is how many there are (None: no end); `arrivals_seconds` is when they came, where that was recorded.
    """

    def __init__(self, spec: WorkloadSpec) -> None:
        self.spec = spec
        self.corpus = Corpus(spec.seed)
        self.count: int | None = None
        self.arrivals_seconds: Sequence[float] = ()

    @abstractmethod
    def turns(self, index: int) -> Iterable[Turn]:
        """The conversation of that index; long ones are made turn by turn, as they are sent."""

    def warmup(self, index: int) -> Prompt:
        """A prompt of the same size that shares its first block with no measured prompt and no other warm-up."""
        text = self.distinct(f"warm-up {index}", self.spec.prompt_tokens)
        return Prompt(NO_GROUP, "", text, self.spec.max_tokens)

    def output_length(self, rng: random.Random) -> int:
        """Even around the asked length: equal lengths would keep the users of a closed loop in step for ever."""
        spread = self.spec.output_spread
        return max(1, round(self.spec.max_tokens * rng.uniform(1 - spread, 1 + spread)))

    def distinct(self, label: str, tokens: int) -> str:
        """Prose that is unlike any other label's from its first bytes on: prefix caches match from the start."""
        rng = random.Random(f"{self.spec.seed}-{label}")
        return self._headed(f"{rng.getrandbits(48):012x} {label}: ", rng, tokens)

    def _headed(self, head: str, rng: random.Random, tokens: int) -> str:
        length_bytes = max(len(head), round(tokens * self.spec.bytes_per_token))
        return head + self.corpus.slice(rng, length_bytes - len(head))


@dataclass(slots=True)
class _Rounds:
    """Which group each index has: every round of as many indices as there are groups has each group once."""

    seed: int
    groups: int
    _round: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list, init=False)

    def group(self, index: int) -> int:
        number, place = divmod(index, self.groups)
        if number != self._round:
            self._order = random.Random(f"{self.seed}-round-{number}").sample(range(self.groups), self.groups)
            self._round = number
        return self._order[place]


class PromptSource(Source):
    """Single requests: with a prefix that a group shares, or with nothing shared."""

    def __init__(self, spec: WorkloadSpec) -> None:
        super().__init__(spec)
        groups = 0 if spec.kind is WorkloadKind.UNIQUE else spec.groups
        self._prefixes = [self.distinct(f"topic {group}", spec.prefix_tokens) for group in range(groups)]
        self._rounds = _Rounds(spec.seed, groups) if spec.kind is WorkloadKind.PREFIX_REPETITION else None

    def turns(self, index: int) -> Sequence[Turn]:
        return (Turn(self.prompt(index)),)

    def prompt(self, index: int) -> Prompt:
        """The prompt of request `index`; its group is drawn uniformly, or each is taken once a round."""
        rng = random.Random(f"{self.spec.seed}-request-{index}")
        tail, max_tokens = self.distinct(f"request {index}", self.spec.tail_tokens), self.output_length(rng)
        asked = self.spec.prompt_tokens
        if not self._prefixes:
            return Prompt(NO_GROUP, "", tail, max_tokens, asked)
        group = rng.randrange(len(self._prefixes)) if self._rounds is None else self._rounds.group(index)
        return Prompt(group, self._prefixes[group], tail, max_tokens, asked)
