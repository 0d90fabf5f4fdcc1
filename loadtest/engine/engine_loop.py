"""Runs the engine model in (scaled) real time on the event loop, and keeps the statistics for its metrics."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, Protocol

from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Committed, Scheduler, Step


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


TTFT_BUCKETS: Final = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
ITL_BUCKETS: Final = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
LATENCY_BUCKETS: Final = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
TOKENS_PER_STEP_BUCKETS: Final = tuple(float(1 << power) for power in (0, *range(3, 15)))


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
        """A sequence was queued, with its maximum length; `answers` is the n of its request, once for all of them."""
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


# If the event loop was late by more than this, engine time falls behind instead of racing to catch up.
_MAX_LAG_SECONDS: Final = 0.05


class TokenSink(Protocol):
    """Receives the tokens of a sequence."""

    def on_tokens(self, generated_tokens: int, finished: bool) -> None:
        """The sequence has that many tokens so far. Must not block."""

    def on_failure(self, failure: Exception) -> None:
        """The engine died: there will be no more tokens."""


@dataclass(slots=True, eq=False)
class Running:
    """A sequence and its listener. `wants_every_token` is false for answers that are sent whole."""

    sequence: SequenceState
    sink: TokenSink
    wants_every_token: bool
    _: KW_ONLY
    finish_reason: str
    loop: "EngineLoop"


class EngineLoop:
    """Owns the scheduler's clock: at most one timer at a time, the end of the step under way."""

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        time_scale: float,
        *,
        loop: asyncio.AbstractEventLoop,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.stats = stats
        self._scale = time_scale
        self._loop = loop
        self._after_step = after_step
        self._running: dict[int, Running] = {}
        self._streaming: dict[int, Running] = {}
        self._step: Step | None = None
        self._timer: asyncio.Handle | None = None
        self._due_seconds = 0.0
        self._engine_seconds = 0.0
        self.paused = False
        self.peak_requests = 0  # most concurrent sequences, running and waiting ones, counted as they arrive

    @property
    def num_requests(self) -> int:
        return len(self._running)

    @property
    def now_seconds(self) -> float:
        """Engine time, at the last step's end."""
        return self._engine_seconds

    def submit(
        self, sequence: SequenceState, sink: TokenSink, wants_every_token: bool, finish_reason: str = "stop"
    ) -> Running:
        """Queue a sequence; its sink hears of it from the next step on."""
        self._catch_up_idle()
        sequence.arrive(self._engine_seconds)
        self.scheduler.add(sequence)
        running = Running(sequence, sink, wants_every_token, finish_reason=finish_reason, loop=self)
        self._running[sequence.sequence_id] = running
        self.peak_requests = max(self.peak_requests, len(self._running))
        if wants_every_token:
            self._streaming[sequence.sequence_id] = running
        self._arm()
        return running

    def abort(self, running: Running) -> None:
        """Take a sequence out immediately; nothing happens if it has ended."""
        sequence_id = running.sequence.sequence_id
        if self._running.pop(sequence_id, None) is None:
            return
        self._streaming.pop(sequence_id, None)
        if self.scheduler.abort(running.sequence):
            self.stats.on_aborted()

    def fail_all(self, failure: Exception) -> None:
        """The engine dies: all sequences end with an error."""
        for running in list(self._running.values()):
            running.sink.on_failure(failure)

    def pause(self, paused: bool) -> None:
        """Stop or resume stepping, as a hung engine would."""
        self.paused = paused
        if not paused:
            self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.paused = True

    def _catch_up_idle(self) -> None:
        """An idle engine's clock moves on with the wall clock."""
        if self._step is None and self._timer is None:
            now = self._loop.time()
            if self._scale > 0 and self._due_seconds:
                self._engine_seconds += max(0.0, now - self._due_seconds) / self._scale
            self._due_seconds = now

    def _arm(self) -> None:
        """Begin stepping if idle. The step is chosen in the next turn of the loop, with all that arrived by then."""
        if self._timer is None and not self.paused:
            self._timer = self._loop.call_soon(self._begin_step)

    def _begin_step(self) -> None:
        self._timer = None
        if self.paused:
            return
        self._step = self.scheduler.schedule(self._engine_seconds)
        if self._step is None:
            return
        now = self._loop.time()
        self._due_seconds = max(self._due_seconds, now - _MAX_LAG_SECONDS) + self._step.duration_seconds * self._scale
        callback: Callable[[], None] = self._end_step
        if self._due_seconds <= now:
            self._timer = self._loop.call_soon(callback)
        else:
            self._timer = self._loop.call_at(self._due_seconds, callback)

    def _end_step(self) -> None:
        self._timer = None
        step = self._step
        assert step is not None
        self._step = None
        self._engine_seconds += step.duration_seconds
        done = self.scheduler.commit(step, self._engine_seconds)
        self.stats.on_step(step, done)
        if self._after_step is not None:
            self._after_step()
        clock = self.scheduler.decode_clock
        for sequence in done.finished:
            running = self._running.pop(sequence.sequence_id, None)
            if running is not None:
                self._streaming.pop(sequence.sequence_id, None)
                self.stats.on_finished(sequence, running.finish_reason)
                running.sink.on_tokens(sequence.output_tokens, True)
        decoding = self.scheduler.decoding
        for sequence_id, running in self._streaming.items():
            if sequence_id in decoding:
                sequence = running.sequence
                running.sink.on_tokens(sequence.earlier_generated_tokens + clock - sequence.decode_since, False)
        if self.scheduler.num_running or self.scheduler.num_waiting:
            self._begin_step()
