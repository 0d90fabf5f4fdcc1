"""Arrivals, steps and aborts in any order never break the scheduler's promises."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loadtest.engine.kv_cache import SequenceState, State
from loadtest.engine.scheduler import Limits, Scheduler, Step
from loadtest.engine.step_time import PRESETS

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=12, block_size=4, num_blocks=10)
ENDED = {State.FINISHED, State.ABORTED}


class SchedulerMachine(RuleBasedStateMachine):
    """One engine with little memory, so that queueing and preemption happen often."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(LIMITS, PRESETS["h100-8b"])
        self.now_seconds = 0.0
        self.step: Step | None = None
        self.sequences: list[SequenceState] = []
        self.finished: list[SequenceState] = []

    @rule(prompt=st.integers(1, 24), output=st.integers(0, 16), family=st.integers(0, 3))
    def arrive(self, prompt: int, output: int, family: int) -> None:
        keys = [family * 100 + block for block in range(prompt // 4)]
        later = [family * 100 + block for block in range(prompt // 4, 12)]
        sequence = SequenceState(len(self.sequences), prompt, output, prompt_keys=keys, output_keys=lambda: later)
        sequence.arrived_seconds = self.now_seconds
        self.sequences.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.step is None)
    @rule(horizon=st.one_of(st.none(), st.floats(0.001, 1)))
    def schedule(self, horizon: float | None) -> None:
        self.step = self.scheduler.schedule(self.now_seconds, None if horizon is None else self.now_seconds + horizon)
        if self.step is None:
            assert all(sequence.state in ENDED for sequence in self.sequences)
        else:
            computed = self.step.decode_sequences + sum(tokens for _, tokens in self.step.prefills)
            assert 0 < computed <= LIMITS.max_num_batched_tokens
            assert all(tokens > 0 for _, tokens in self.step.prefills)

    @precondition(lambda self: self.step is not None)
    @rule()
    def commit(self) -> None:
        assert self.step is not None
        self.now_seconds += self.step.duration_seconds
        self.finished += self.scheduler.commit(self.step, self.now_seconds).finished
        self.step = None

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]
        ended = sequence.state in ENDED
        assert self.scheduler.abort(sequence) is not ended
        assert not sequence.blocks

    @invariant()
    def limits_hold(self) -> None:
        assert self.scheduler.num_running <= LIMITS.max_num_seqs
        held = {block for sequence in self.sequences for block in sequence.blocks}
        assert self.scheduler.pool.num_used == len(held)

    @invariant()
    def everyone_is_somewhere(self) -> None:
        states = [sequence.state for sequence in self.sequences]
        assert self.scheduler.num_waiting == states.count(State.WAITING)
        assert len(self.scheduler.prefilling) == states.count(State.PREFILLING) <= LIMITS.max_num_seqs
        assert len(self.scheduler.decoding) == states.count(State.DECODING)
        assert len(self.finished) == states.count(State.FINISHED)

    @invariant()
    def decoding_sequences_have_room_for_what_they_computed(self) -> None:
        context = 0
        for sequence in self.scheduler.decoding.values():
            computed = sequence.computed_tokens + self.scheduler.decode_clock - sequence.decode_since
            context += computed
            assert computed <= len(sequence.blocks) * LIMITS.block_size
            assert self.scheduler.generated_tokens(sequence) < sequence.output_tokens
        assert self.scheduler._context_tokens == context

    def teardown(self) -> None:
        if self.step is not None:
            self.commit()
        while step := self.scheduler.schedule(self.now_seconds):
            self.step = step
            self.commit()
        assert all(sequence.state in ENDED for sequence in self.sequences)
        assert self.scheduler.pool.num_used == 0
        assert self.scheduler.num_waiting == 0
        for sequence in self.finished:
            assert sequence.arrived_seconds <= sequence.scheduled_seconds <= sequence.first_token_seconds
            assert sequence.first_token_seconds <= sequence.finished_seconds


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
