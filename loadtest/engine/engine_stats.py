"""What an engine has done, as its metrics need it: request times and per-step token counts."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from loadtest.engine.scheduler import Committed, Step
from loadtest.engine.sequence import SequenceState

TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKENS_PER_STEP_BUCKETS: Final = (
    1.0,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
)


def token_buckets(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the longest sequence."""
    buckets: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > max_tokens:
                return tuple(buckets)
            buckets.append(float(mantissa * scale))
        scale *= 10


class Histogram:
    """Counts by bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class EngineStats:
    """Histograms over steps and requests, and how requests ended."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_buckets(max_model_len)
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(ITL_BUCKETS)
        self.time_per_output_token = Histogram(ITL_BUCKETS)
        self.e2e_latency = Histogram(LATENCY_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.prefill_time = Histogram(LATENCY_BUCKETS)
        self.decode_time = Histogram(LATENCY_BUCKETS)
        self.inference_time = Histogram(LATENCY_BUCKETS)
        self.iteration_tokens = Histogram(TOKENS_PER_STEP_BUCKETS)
        self.prompt_tokens = Histogram(tokens)
        self.generation_tokens = Histogram(tokens)
        self.prefill_computed_tokens = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.preemptions = Histogram((0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0))
        self.n = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "repetition": 0}

    def on_step(self, step: Step, done: Committed) -> None:
        self.iteration_tokens.observe(step.decode_sequences + sum(tokens for _, tokens in step.prefills))
        if step.decode_sequences:
            self.inter_token_latency.observe(step.duration_seconds, step.decode_sequences)
        for sequence in done.started:
            self.time_to_first_token.observe(sequence.first_token_seconds - sequence.arrived_seconds)

    def on_asked(self, answers: int | None, limit_tokens: int) -> None:
        """A sequence was queued that may get so long; `answers` tells the n of its request, once for all of them."""
        self.max_tokens.observe(limit_tokens)
        if answers is not None:
            self.n.observe(answers)

    def on_aborted(self) -> None:
        self.finished["abort"] += 1

    def on_finished(self, sequence: SequenceState, reason: str) -> None:
        self.finished[reason] += 1
        decode = sequence.finished_seconds - sequence.first_token_seconds
        self.e2e_latency.observe(sequence.finished_seconds - sequence.arrived_seconds)
        self.queue_time.observe(sequence.scheduled_seconds - sequence.arrived_seconds)
        self.prefill_time.observe(sequence.first_token_seconds - sequence.scheduled_seconds)
        self.inference_time.observe(sequence.finished_seconds - sequence.scheduled_seconds)
        self.decode_time.observe(decode)
        self.preemptions.observe(sequence.preemptions)
        self.prompt_tokens.observe(sequence.prompt_tokens)
        self.prefill_computed_tokens.observe(sequence.prompt_tokens - sequence.cached_tokens)
        if sequence.output_tokens:
            self.generation_tokens.observe(sequence.output_tokens)
            if sequence.output_tokens > 1:
                self.time_per_output_token.observe(decode / (sequence.output_tokens - 1))
