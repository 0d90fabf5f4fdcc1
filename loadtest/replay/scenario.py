"""What is replayed: engines, load, faults, and the bounds that answers must keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.engine.scheduler import Limits
from loadtest.engine.step_time import PRESETS, StepTime
from loadtest.replay.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Bounds:
    """An answer is good if TTFT is within base + factor x its prefill on an idle engine without a cache, and TPOT is
    within its bound."""

    ttft_seconds: float = 0.5
    ttft_prefills: float = 1.5
    tpot_seconds: float = 0.04


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong: slow engines (`slow_factor` x all step times), and engines that lose their cache midway."""

    slow_factor: float = 1.0
    slow_engines: int = 0
    restart_at: float | None = None  # share of the replay's length
    restart_share: float = 0.5  # of the engines, the first ones
    flash_crowd: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cell of the grid but for the policy."""

    engines: int
    rate_per_second: float
    seed: int
    preset: str = "h100-8b"
    kv_tokens: int = 430_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    itl_objective_seconds: float | None = None  # that the gateway's adaptive limit keeps to
    bounds: Bounds = field(default_factory=Bounds)
    faults: Faults = field(default_factory=Faults)
    lengths: Lengths = field(default_factory=Lengths)

    @property
    def step_time(self) -> StepTime:
        """How long steps of an engine that is not slow take."""
        return PRESETS[self.preset]

    def limits(self, block_tokens: int) -> Limits:
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=block_tokens,
            num_blocks=self.kv_tokens // block_tokens,
        )

    def speeds(self) -> tuple[float, ...]:
        """Relative step times: the last ones are slow."""
        slow = min(self.faults.slow_engines, self.engines)
        return (1.0,) * (self.engines - slow) + (self.faults.slow_factor,) * slow

    def cold_prefill_seconds(self, prompt_tokens: int) -> float:
        """Time to the first token on an idle engine that holds nothing of the prompt."""
        steps = -(-prompt_tokens // self.max_num_batched_tokens)
        return steps * self.step_time.base_seconds + self.step_time.prefill_seconds(prompt_tokens, 0)
