"""A replayed scenario: engines, load, lengths, faults, and the latency bounds of answers."""

from __future__ import annotations

import math
import random
from dataclasses import KW_ONLY, dataclass, field

from loadtest.engine.scheduler import Limits
from loadtest.engine.step_time import PRESETS, StepTime


@dataclass(frozen=True, slots=True)
class Lengths:
    """Answers are `output_times` as long as recorded. Clients state `max_tokens_times` the answer's length as
    `max_tokens`, or nothing. The gateway misjudges prompts by a factor whose logarithm has the deviation `misjudged`.
    """

    output_times: float = 1.0
    max_tokens_times: float | None = None
    misjudged: float = 0.0

    def output_tokens(self, recorded: int) -> int:
        return max(1, round(recorded * self.output_times))

    def max_tokens(self, output_tokens: int) -> int | None:
        """The client's `max_tokens` for such an answer."""
        times = self.max_tokens_times
        return None if times is None else max(output_tokens, math.ceil(output_tokens * times))

    def believed_tokens(self, prompt_tokens: int, number: int) -> int:
        """The gateway's estimate of that request's prompt."""
        if not self.misjudged:
            return prompt_tokens
        return max(1, round(prompt_tokens * math.exp(random.Random(number).gauss(0.0, self.misjudged))))


@dataclass(frozen=True, slots=True)
class LatencyBounds:
    """An answer is good if TTFT is within base + factor x its prefill on an idle engine without a cache, and TPOT is
    within its bound."""

    ttft_seconds: float = 0.5
    ttft_prefills: float = 1.5
    tpot_seconds: float = 0.04


@dataclass(frozen=True, slots=True)
class Misleading:
    """Wrong values in the metrics for the gateway; the engines are unchanged.

    Metrics show `waiting` requests too many, `preemptions` a second that never happened, a KV cache of `kv_times` its
    size, and `max_num_seqs` (None = the truth).
    """

    waiting: int = 0
    preemptions: float = 0.0
    kv_times: float = 1.0
    _: KW_ONLY
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFaults:
    """Faults: slow engines (`slow_factor` x all step times), engines that lose their cache midway, wrong metrics.

    Changes: engines that join.
    """

    slow_factor: float = 1.0
    _: KW_ONLY
    slow_engines: int = 0
    slow_is_told: bool = True  # to the gateway, as its configuration
    restart_at: float | None = None  # share of the replay's length
    restart_share: float = 0.5  # of the engines, the first ones
    flash_crowd: bool = False
    join_at: float | None = None  # share of the replay's length
    join_engines: int = 0  # that come then, with empty caches
    misleading: Misleading = field(default_factory=Misleading)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cell of the grid, without the policy. `engines`: from the beginning on; others may join."""

    engines: int
    rate_per_second: float
    seed: int
    _: KW_ONLY
    step_time: StepTime = PRESETS["h100-8b"]  # of an engine that is not slow
    kv_tokens: int = 430_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    itl_objective_seconds: float | None = None  # that the gateway's adaptive limit keeps to
    bounds: LatencyBounds = field(default_factory=LatencyBounds)
    faults: EngineFaults = field(default_factory=EngineFaults)
    lengths: Lengths = field(default_factory=Lengths)

    @property
    def all_engines(self) -> int:
        """The number of engines at the end; joining engines are the last ones."""
        return self.engines + self.faults.join_engines

    @property
    def shown_kv_tokens(self) -> int:
        """The size of a KV cache that the gateway gets."""
        return int(self.kv_tokens * self.faults.misleading.kv_times)

    @property
    def shown_max_num_seqs(self) -> int:
        """The batch size that the gateway gets."""
        return self.faults.misleading.max_num_seqs or self.max_num_seqs

    def limits(self, block_tokens: int) -> Limits:
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=block_tokens,
            num_blocks=self.kv_tokens // block_tokens,
        )

    def speeds(self) -> tuple[float, ...]:
        """Relative step times: of the engines at the beginning, the last ones are slow."""
        slow = min(self.faults.slow_engines, self.engines)
        fast = (1.0,) * (self.engines - slow)
        return fast + (self.faults.slow_factor,) * slow + (1.0,) * self.faults.join_engines

    def told_speeds(self) -> tuple[float, ...]:
        """The same, as the gateway is configured."""
        return self.speeds() if self.faults.slow_is_told else (1.0,) * self.all_engines

    def cold_prefill_seconds(self, prompt_tokens: int) -> float:
        """Time to the first token on an idle engine without cached parts of the prompt."""
        steps = -(-prompt_tokens // self.max_num_batched_tokens)
        return steps * self.step_time.base_seconds + self.step_time.prefill_seconds(prompt_tokens, 0)
