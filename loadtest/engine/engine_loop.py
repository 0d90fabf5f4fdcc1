"""Drives the model of an engine in (scaled) real time on the event loop."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from loadtest.engine.engine_stats import EngineStats
from loadtest.engine.scheduler import Scheduler, Step
from loadtest.engine.sequence import SequenceState

# If the event loop was late by more than this, engine time falls behind instead of racing to catch up.
_MAX_LAG_SECONDS: Final = 0.05


class TokenSink(Protocol):
    """Who is told of a sequence's tokens."""

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
    finish_reason: str
    loop: "EngineLoop"


class EngineLoop:
    """Owns the scheduler's clock: at most one timer at a time, the end of the step under way."""

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        time_scale: float,
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
        sequence.arrived_seconds = self._engine_seconds
        self.scheduler.add(sequence)
        running = Running(sequence, sink, wants_every_token, finish_reason, self)
        self._running[sequence.sequence_id] = running
        if wants_every_token:
            self._streaming[sequence.sequence_id] = running
        self._arm()
        return running

    def abort(self, running: Running) -> None:
        """Take a sequence out at once; nothing happens if it has ended."""
        sequence_id = running.sequence.sequence_id
        if self._running.pop(sequence_id, None) is None:
            return
        self._streaming.pop(sequence_id, None)
        if self.scheduler.abort(running.sequence):
            self.stats.on_aborted()

    def fail_all(self, failure: Exception) -> None:
        """The engine dies: everyone who waits for tokens is told."""
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
