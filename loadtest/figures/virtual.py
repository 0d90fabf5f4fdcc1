"""Load on one simulated engine in virtual time: hours of serving are computed in a second. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Limits, Scheduler, Step
from loadtest.engine.step_time import HOST_SECONDS, StepTime


@dataclass(frozen=True, slots=True)
class Demanded:
    """One request. Requests of one `prefix` begin with the same `prefix_tokens`."""

    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None
    _: KW_ONLY
    prefix_tokens: int = 0


@dataclass(slots=True)
class Measured:
    """The results of a load. Latencies are in seconds, in the order in which requests ended."""

    seconds: float = 0.0
    _: KW_ONLY
    busy_seconds: float = 0.0  # in which the GPU computes: neither idle nor waiting for the host
    output_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    peak_running: int = 0
    # When each step ended, and how many sequences were in its batch.
    running: list[tuple[float, int]] = field(default_factory=list)
    ended: list[SequenceState] = field(default_factory=list)
    # Seconds between tokens, with the number of tokens after each such time.
    gaps: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.ended) / self.seconds

    @property
    def gpu_utilization(self) -> float:
        return self.busy_seconds / self.seconds

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    def ttft_seconds(self, percent: float, longest_prompt: float = math.inf, shortest_prompt: int = 0) -> float:
        """A percentile of the time to the first token, of prompts of these lengths."""
        times = [
            (one.first_token_seconds - one.arrived_seconds, 1)
            for one in self.ended
            if shortest_prompt <= one.prompt_tokens <= longest_prompt
        ]
        return _percentile(times, percent)

    def gap_seconds(self, percent: float) -> float:
        """A percentile of the time between two tokens of an answer."""
        return _percentile(self.gaps, percent)

    def on_step(self, step: Step) -> None:
        self.seconds += step.duration_seconds
        self.running.append((self.seconds, step.decode_sequences + len(step.prefills)))
        self.busy_seconds += step.duration_seconds - min(HOST_SECONDS * step.repeat, step.duration_seconds)
        if step.decode_sequences:
            self.gaps.append((step.duration_seconds / step.repeat, step.decode_sequences * step.repeat))

    def on_idle(self, seconds: float) -> None:
        self.seconds += seconds

    def on_ended(self, sequences: Sequence[SequenceState]) -> None:
        self.ended += sequences

    def on_end(self, scheduler: Scheduler) -> None:
        counters = scheduler.counters
        self.output_tokens, self.preemptions = counters.generation_tokens, counters.preemptions
        self.prompt_tokens, self.hit_tokens = counters.prompt_tokens, counters.prompt_tokens_cached
        self.peak_running = counters.peak_running


def closed_loop(demands: Sequence[Demanded], users: int, limits: Limits, step_time: StepTime) -> Measured:
    """`users` send the requests in their order; each waits for its answer."""
    return _run([0.0] * min(users, len(demands)), demands, limits, step_time)


def open_loop(
    demands: Sequence[Demanded], arrivals_seconds: Sequence[float], limits: Limits, step_time: StepTime
) -> Measured:
    """The requests arrive at these times, in ascending order, whatever the latency."""
    return _run(list(arrivals_seconds), demands, limits, step_time)


def _run(arrivals: list[float], demands: Sequence[Demanded], limits: Limits, step_time: StepTime) -> Measured:
    """Requests beyond the arrivals that are known come when one has ended."""
    scheduler, found, now, sent = Scheduler(limits, step_time), Measured(), 0.0, 0
    heapq.heapify(arrivals)
    known = len(arrivals)
    while arrivals or scheduler.num_running or scheduler.num_waiting:
        while arrivals and arrivals[0] <= now:
            sequence = _sequence(sent, demands[sent], limits.block_size)
            sequence.arrive(heapq.heappop(arrivals))
            scheduler.add(sequence)
            sent += 1
        step = scheduler.schedule(now, arrivals[0] if arrivals else math.inf)
        if step is None:
            found.on_idle(arrivals[0] - now)
            now = arrivals[0]
            continue
        now += step.duration_seconds
        done = scheduler.commit(step, now)
        found.on_step(step)
        found.on_ended(done.finished)
        for _ in done.finished[: len(demands) - known]:
            heapq.heappush(arrivals, now)
            known += 1
    found.on_end(scheduler)
    return found


def _sequence(number: int, demand: Demanded, block_tokens: int) -> SequenceState:
    """Keys of its blocks: those of the prefix are the same in all requests of that prefix."""
    shared = 0 if demand.prefix is None else demand.prefix_tokens // block_tokens
    keys = [
        hash((demand.prefix, -1, block) if block < shared else (number, block))
        for block in range(demand.prompt_tokens // block_tokens)
    ]
    return SequenceState(number, demand.prompt_tokens, demand.output_tokens, prompt_keys=keys)


def _percentile(weighted: Sequence[tuple[float, int]], percent: float) -> float:
    """The nearest rank; 0 if there is nothing."""
    left = sum(weight for _, weight in weighted) * percent / 100
    for value, weight in sorted(weighted):
        left -= weight
        if left <= 0:
            return value
    return 0.0
