import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.routing.engine import EngineLoad
from gateway.core.routing.kv_reservations import Reservation
from tests.unit.routing import crowds


def work(seconds: float = 1.0, *, sequences: int = 1, observable: bool = True) -> Reservation:
    return crowds.work(sequences, 100, seconds, observable)


class LoadMachine(RuleBasedStateMachine):
    """Requests start, get their first token and finish in any order; repetition has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.load = EngineLoad()
        self.now = 0.0
        self.running: list[Reservation] = []
        self.in_prefill: list[Reservation] = []

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(sequences=st.integers(0, 8), prompt=st.integers(1, 10_000), seconds=st.floats(0, 5), observable=st.booleans())
    def start(self, sequences: int, prompt: int, seconds: float, observable: bool) -> None:
        started = crowds.work(sequences, prompt, seconds, observable)
        self.load.start(started, self.now)
        self.running.append(started)
        self.in_prefill.append(started)

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.running:
            chosen = data.draw(st.sampled_from(self.running))
            self.load.first_token(chosen, self.now)
            if chosen in self.in_prefill:
                self.in_prefill.remove(chosen)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.running:
            chosen = data.draw(st.sampled_from(self.running))
            self.load.finish(chosen, self.now)
            self.running.remove(chosen)
            if chosen in self.in_prefill:
                self.in_prefill.remove(chosen)

    @rule()
    def ask_for_the_prefill_ahead(self) -> None:
        ahead = self.load.prefill_ahead_seconds(self.now)
        assert 0.0 <= ahead <= sum(work.prefill_seconds for work in self.in_prefill) + 1e-9
        assert self.load.prefill_ahead_seconds(self.now) == ahead
        if not self.in_prefill:
            assert ahead == 0.0

    @rule()
    def ask_what_is_behind_a_long_prefill(self) -> None:
        behind = self.load.behind_prefill(self.now)
        assert behind in (0, self.load.in_flight - self.load.decoding)
        if max((work.prefill_seconds for work in self.in_prefill), default=0.0) <= 0.5:
            assert behind == 0

    @invariant()
    def counters_are_sums_over_what_runs(self) -> None:
        assert self.load.in_flight == sum(work.sequences for work in self.running)
        assert self.load.context_tokens == sum(work.demand.prompt_tokens for work in self.running)
        assert 0 <= self.load.decoding <= self.load.in_flight

    def teardown(self) -> None:
        for left in self.running:
            self.load.finish(left, self.now)
        assert repr(self.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"
        assert self.load.prefill_ahead_seconds(self.now) == 0.0


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_prefill_ahead_is_the_sum_less_what_has_passed_of_the_oldest() -> None:
    load = EngineLoad()
    load.start(work(2.0), 10.0)
    load.start(work(3.0), 11.0)
    assert load.prefill_ahead_seconds(11.0) == pytest.approx(4.0)
    assert load.prefill_ahead_seconds(11.5) == pytest.approx(3.5)


def test_a_streamed_prefill_counts_as_running_until_its_first_token_though_it_takes_longer_than_predicted() -> None:
    load = EngineLoad()
    load.start(work(2.0), 0.0)
    load.start(work(3.0), 0.0)
    assert load.prefill_ahead_seconds(50.0) == pytest.approx(3.0)
    assert load.decoding == 0


def test_a_first_token_moves_a_request_from_prefill_to_decode_once() -> None:
    load = EngineLoad()
    first = work(2.0, sequences=3)
    load.start(first, 0.0)
    load.start(work(3.0), 0.0)
    load.first_token(first, 2.5)
    load.first_token(first, 2.6)
    assert load.decoding == 3
    assert load.prefill_ahead_seconds(2.5) == pytest.approx(3.0)
    assert load.prefill_ahead_seconds(3.5) == pytest.approx(2.0)


def test_prefills_that_are_not_seen_end_one_after_another_when_they_were_predicted_to() -> None:
    load = EngineLoad()
    first, second = work(2.0, observable=False), work(3.0, observable=False)
    load.start(first, 0.0)
    load.start(second, 0.0)
    assert load.prefill_ahead_seconds(1.0) == pytest.approx(4.0)
    assert load.prefill_ahead_seconds(3.0) == pytest.approx(2.0)
    assert load.decoding == 1
    assert load.prefill_ahead_seconds(6.0) == 0.0
    assert load.decoding == 2
    load.finish(first, 7.0)
    load.finish(second, 7.0)
    assert load.decoding == 0


def test_all_without_a_first_token_are_behind_a_long_prefill_until_it_should_be_over() -> None:
    load = EngineLoad()
    first, chats = work(8.0), work(0.1, sequences=3)
    load.start(first, 0.0)
    load.start(chats, 1.0)
    assert load.behind_prefill(1.0) == 4
    assert load.behind_prefill(7.0) == 4
    assert load.behind_prefill(7.8) == 0  # it may still run, but explains little
    load.first_token(first, 7.9)
    assert load.behind_prefill(7.9) == 0


def test_many_short_prefills_are_not_a_long_one() -> None:
    load = EngineLoad()
    for _ in range(100):  # ten seconds of prefill: they wait for slots
        load.start(work(0.1), 0.0)
    assert load.behind_prefill(0.0) == 0


def test_a_long_prefill_that_is_not_seen_ends_when_it_was_predicted_to() -> None:
    load = EngineLoad()
    load.start(work(8.0, observable=False), 0.0)
    load.start(work(0.1), 0.0)
    assert load.behind_prefill(7.0) == 2
    assert load.behind_prefill(8.0) == 0
    assert load.decoding == 1


def test_a_request_that_is_aborted_in_prefill_leaves_nothing() -> None:
    load = EngineLoad()
    aborted, other = work(2.0), work(3.0)
    load.start(aborted, 0.0)
    load.start(other, 0.0)
    load.finish(aborted, 1.0)
    assert load.prefill_ahead_seconds(1.0) == pytest.approx(3.0)
    assert load.in_flight == 1


def test_a_request_is_alone_in_prefill_only_if_no_other_ever_was_with_it() -> None:
    load = EngineLoad()
    first, second, third = work(), work(), work()
    load.start(first, 1.0)
    assert (first.alone, first.started_seconds) == (True, 1.0)
    load.start(second, 2.0)
    assert not first.alone
    assert not second.alone
    load.first_token(first, 3.0)
    load.first_token(second, 3.0)
    load.start(third, 4.0)
    assert third.alone


def test_only_the_first_call_of_first_token_returns_true() -> None:
    load, started = EngineLoad(), work()
    load.start(started, 0.0)
    assert load.pending
    assert load.first_token(started, 1.0) is True
    assert load.first_token(started, 1.0) is False
    assert not load.pending
