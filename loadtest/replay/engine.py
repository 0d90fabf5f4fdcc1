"""One modelled engine in virtual time, for a replay that may send it a request at any moment.

A stretch of decode-only steps is not carried out until its end, or until a request arrives in the middle of it; a step
that has begun is never changed. So a replay costs a few operations a request, and is exact all the same.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import KW_ONLY, dataclass, field

from loadtest.engine.kv_cache import SequenceState, State
from loadtest.engine.scheduler import Committed, Limits, Scheduler, Step
from loadtest.engine.step_time import StepTime

_NOTHING = Committed(0)


class _Scheduler(Scheduler):
    @property
    def only_decodes(self) -> bool:
        """No request is in prefill and none waits."""
        return bool(self.decoding) and not self.prefilling and not self.waiting

    def steps_to_first_end(self) -> int:
        """Decode steps until the first sequence is at its end."""
        ends = self._ends
        while ends[0][2].state is not State.DECODING or ends[0][2].decode_until != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0] - self.decode_clock

    def seconds_of(self, steps: int) -> float:
        """The duration of this many decode-only steps."""
        return self.step_time.decode_stretch_seconds(steps, len(self.decoding), self._context_tokens)

    def has_blocks_for(self, steps: int) -> bool:
        """Whether that many steps certainly find the blocks that they begin."""
        return len(self.decoding) * (steps // self.limits.block_size + 1) <= self.pool.num_free


class ReplayEngine:
    """An engine that says when its next event is; `advance` carries it out."""

    def __init__(self, limits: Limits, step_time: StepTime) -> None:
        self.scheduler = _Scheduler(limits, step_time)
        self.next_event_seconds = math.inf
        self.sequence_seconds = 0.0  # sequences in the batch, summed over time
        self.peak_waiting = 0  # most that a step had no place for
        self._step: Step | None = None
        self._decodes_since: float | None = None  # decode-only steps from then on are still to be carried out

    def submit(self, sequence: SequenceState, now: float) -> None:
        """A request arrives; it joins the step after the running one."""
        if self._decodes_since is not None:
            self._catch_up(now)
        sequence.arrive(now)
        self.scheduler.add(sequence)
        if self._step is None:
            self._begin(now)

    def advance(self) -> Committed:
        """Events at `next_event_seconds`; the next step begins immediately."""
        now = self.next_event_seconds
        if self._decodes_since is not None:
            self._catch_up(math.inf)
            if self.next_event_seconds > now:
                return _NOTHING  # the same moment except for rounding
        assert self._step is not None
        done = self._commit(self._step, now)
        self._begin(now)
        return done

    def catch_up(self, now: float) -> None:
        """Prepare a look at the scheduler's state; the next event may become earlier."""
        if self._decodes_since is not None:
            self._catch_up(now)

    def forget_cache(self) -> None:
        """The prefix cache is lost, except for blocks of running sequences; no event reports it."""
        pool = self.scheduler.pool
        pool.release(pool.allocate(pool.num_free))

    def _begin(self, now: float) -> None:
        scheduler = self.scheduler
        self._step, self._decodes_since = None, None
        if scheduler.only_decodes:
            steps = scheduler.steps_to_first_end()
            if scheduler.has_blocks_for(steps):
                self._decodes_since = now
                self.next_event_seconds = now + scheduler.seconds_of(steps)
                return
            self._step = scheduler.schedule(now)
        else:
            # Waiting requests are first in line, so an arrival cannot change a stretch without admissions.
            self._step = scheduler.schedule(now, math.inf)
        self.peak_waiting = max(self.peak_waiting, scheduler.num_waiting)
        self.next_event_seconds = math.inf if self._step is None else now + self._step.duration_seconds

    def _catch_up(self, now: float) -> None:
        """Carry out the decode steps begun by now, except for the last one, or a step that ends a sequence."""
        scheduler, since = self.scheduler, self._decodes_since
        assert since is not None
        self._decodes_since = None
        while True:
            until_end = scheduler.steps_to_first_end()
            step = scheduler.schedule(since, now)
            assert step is not None
            end = since + step.duration_seconds
            if end > now or step.repeat >= until_end:
                self._step, self.next_event_seconds = step, end
                return
            self._commit(step, end)
            since = end

    def _commit(self, step: Step, now: float) -> Committed:
        self.sequence_seconds += step.duration_seconds * self.scheduler.num_running
        return self.scheduler.commit(step, now)


_NEVER = -1.0


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """Times are in seconds from the replay's start; negative = not reached.

    `keys` are of the prompt's full blocks, `answer_keys` of blocks completed by its answer. `following` is the
    session's next turn, sent `think_seconds` of its own after this one's end. `turn` and `turn_end` count the keys
    before and through the last answer that the prompt holds; 0 if the trace shows none.
    """

    number: int
    _: KW_ONLY
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    answer_keys: tuple[int, ...] = ()
    think_seconds: float = 0.0
    turn: int = 0
    turn_end: int = 0
    following: ReplayRequest | None = field(default=None, repr=False)
    max_tokens: int | None = None  # as the client states it
    believed_tokens: int | None = None  # the prompt length assumed by the gateway; None = the true one

    sequence: SequenceState | None = field(default=None, repr=False)  # in the engine it was sent to
    engine: int = -1
    sent_seconds: float = _NEVER
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    first_token_seconds: float = _NEVER
    finished_seconds: float = _NEVER

    def plan(self, number: int, output_tokens: int, max_tokens: int | None, believed_tokens: int) -> None:
        """Its place among all, and lengths that may differ from the recorded ones."""
        self.number, self.output_tokens = number, output_tokens
        self.max_tokens, self.believed_tokens = max_tokens, believed_tokens

    def lead_to(self, following: ReplayRequest) -> None:
        """That one is sent after this one's end."""
        self.following = following
        following.arrive(math.inf)

    def arrive(self, now: float) -> None:
        self.arrival_seconds = now

    def send(self, sequence: SequenceState, engine: int, now: float) -> None:
        self.sequence, self.engine, self.sent_seconds = sequence, engine, now

    def begin(self, now: float, cached_tokens: int) -> None:
        self.first_token_seconds, self.cached_tokens = now, cached_tokens

    def finish(self, now: float, sequence: SequenceState) -> None:
        self.finished_seconds = now
        self.preemptions, self.recomputed_tokens = sequence.preemptions, sequence.recomputed_tokens

    @property
    def ttft_seconds(self) -> float:
        """From arrival at the gateway to the first token."""
        return self.first_token_seconds - self.arrival_seconds

    @property
    def e2e_seconds(self) -> float:
        """From arrival at the gateway to the last token."""
        return self.finished_seconds - self.arrival_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time between tokens after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.finished_seconds - self.first_token_seconds) / (self.output_tokens - 1)


Sending = tuple[ReplayRequest, int]  # and the index of the engine that gets it
