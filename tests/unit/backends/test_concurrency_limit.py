import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.backends.concurrency_limit import (
    DEFAULT_MAX_NUM_SEQS,
    LimitChange,
    Limiter,
    LimitReason,
)
from gateway.core.backends.facts import Telemetry
from gateway.core.scheduling.admission import guarded_slots

from .limited import LOOK_SECONDS, Site, bound, stream

FALLS = {LimitReason.PREEMPTIONS, LimitReason.WAITING, LimitReason.INTER_TOKEN_LATENCY}


def reason_of(move: LimitChange | None) -> LimitReason | None:
    return move and move.reason


def test_it_starts_at_the_known_bound_or_at_vllms_default() -> None:
    limiter = Limiter()
    assert (limiter.limit, limiter.upper) == (DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_SEQS)
    limiter.bind(64, 1)
    assert (limiter.limit, limiter.upper) == (64, 64)
    limiter.bind(None, 4)
    assert (limiter.limit, limiter.upper) == (1024, 1024)


def test_a_new_bound_leaves_a_limit_that_has_fallen() -> None:
    site = Site(bound(100), seats=40)
    site.looks(3)
    fallen = site.limiter.limit
    assert fallen < 100
    site.limiter.bind(200, 1)
    assert (site.limiter.limit, site.limiter.upper) == (fallen, 200)
    site.limiter.bind(2, 1)
    assert (site.limiter.limit, site.limiter.upper) == (2, 2)


def test_new_preemptions_lower_it_below_what_ran() -> None:
    site = Site(bound(100))
    site.look()
    assert site.look(preempted=20) is None
    assert site.look(preempted=5) == LimitChange(6.0, LimitReason.PREEMPTIONS, 100, after=90)


def test_a_preemption_before_the_first_sample_is_no_sign() -> None:
    limiter = bound(100)
    limiter.observe(Telemetry(0.0, running=100, waiting=0, preemptions=50.0, kv_usage=0.5, in_flight=100, sent=0))
    assert (
        limiter.observe(Telemetry(2.0, running=100, waiting=0, preemptions=50.0, kv_usage=0.5, in_flight=100, sent=0))
        is None
    )


def test_one_overload_is_punished_once_until_what_was_sent_has_ended() -> None:
    site = Site(bound(100))
    site.look()
    site.look(preempted=50)
    assert [site.look(in_flight=count, preempted=50) for count in (100, 97, 90)] == [None] * 3
    assert site.look(preempted=0, kv_usage=0.95) is None
    assert reason_of(site.look(preempted=50)) is LimitReason.PREEMPTIONS


def test_requests_that_wait_inside_in_two_samples_lower_it_to_what_runs() -> None:
    site = Site(bound(100), seats=70)
    assert site.look() is None
    assert reason_of(site.look()) is LimitReason.WAITING
    assert 70 <= site.limiter.limit <= 73


def test_no_fall_takes_more_than_half() -> None:
    site = Site(bound(256), seats=30)
    assert [move.after for move in site.looks(2)] == [128]


def test_a_limit_far_above_what_is_in_flight_falls_to_half_of_that_at_once() -> None:
    site = Site(bound(256), seats=10)
    site.look(in_flight=60)
    assert site.look(in_flight=60) == LimitChange(4.0, LimitReason.WAITING, 256, after=30)


def test_few_requests_that_are_preempted_leave_room_for_many_that_are_not() -> None:
    site = Site(bound(256))
    site.look(in_flight=3)
    assert site.look(in_flight=3, preempted=1) == LimitChange(4.0, LimitReason.PREEMPTIONS, 256, after=128)


def test_a_queue_seen_only_once_is_no_sign() -> None:
    site = Site(bound(100), seats=70)
    for seats in (70, 1000, 70, 1000, 70):
        site.seats = seats
        assert site.look() is None


def test_a_few_may_wait() -> None:
    site = Site(bound(64), seats=61)
    assert site.looks(10) == []


def check_no_sign_until(look: Telemetry, sign: Telemetry) -> None:
    """What waits at one look, seen five times, lowers no limit of 256; at the other one it does."""
    limiter = bound(256)
    for turn in range(5):
        assert limiter.observe(replace(look, at_seconds=2.0 * turn)) is None
    assert reason_of(limiter.observe(replace(sign, at_seconds=10.0))) is LimitReason.WAITING


def test_an_engine_that_generates_nothing_may_have_lists_waiting() -> None:
    look = Telemetry(
        0.0, running=40, waiting=200, preemptions=0.0, kv_usage=0.1, in_flight=240, sent=0, generation_tokens=7.0
    )
    check_no_sign_until(look, replace(look, generation_tokens=8.0))


def test_arrivals_that_wait_for_the_step_under_way_are_no_sign() -> None:
    limiter = bound(256)
    limiter.streamed(0.1, 1.0, 2.0)
    look = Telemetry(0.0, running=245, waiting=12, preemptions=0.0, kv_usage=0.5, in_flight=256, sent=0)
    for turn in range(5):  # 100 a second are sent, and each step takes a tenth of a second
        assert limiter.observe(replace(look, at_seconds=2.0 * turn, sent=200 * turn)) is None
    assert reason_of(limiter.observe(replace(look, at_seconds=10.0, sent=800))) is LimitReason.WAITING


def test_requests_behind_a_long_prefill_are_no_sign() -> None:
    look = Telemetry(0.0, running=1, waiting=60, preemptions=0.0, kv_usage=0.5, in_flight=61, sent=0, behind_prefill=61)
    check_no_sign_until(look, replace(look, behind_prefill=10))


def test_slow_streams_lower_it_in_proportion() -> None:
    site = Site(bound(100, objective=0.05))
    site.look()
    stream(site.limiter, 0.0625, 3.0)
    assert site.look() == LimitChange(4.0, LimitReason.INTER_TOKEN_LATENCY, 100, after=80)


def test_a_few_slow_streams_are_not_enough() -> None:
    site = Site(bound(100, objective=0.05))
    site.look()
    stream(site.limiter, 1.0, 3.0, times=7)
    assert site.look() is None


def test_the_pace_is_that_of_the_slower_streams() -> None:
    limiter = bound(100)
    for turn in range(1000):
        limiter.streamed(0.02 if turn % 2 else 0.06, 1.0, 2.0)
    assert 0.045 < limiter.pace_seconds < 0.06


def test_streams_of_the_former_limit_do_not_count_against_the_new_one() -> None:
    site = Site(bound(100, objective=0.05))
    site.look()
    stream(site.limiter, 0.0625, 3.0)
    site.look()
    stream(site.limiter, 0.0625, 5.0)  # not settled: 100 are still in flight
    site.look(in_flight=80)
    stream(site.limiter, 0.0625, 6.4)  # most of their time was before
    assert site.look() is None
    stream(site.limiter, 0.0625, 12.0)
    assert reason_of(site.look()) is LimitReason.INTER_TOKEN_LATENCY


def test_it_does_not_grow_when_streams_are_about_as_slow_as_they_may_be() -> None:
    site = Site(bound(100, objective=0.05))
    site.limiter.limit = 50
    stream(site.limiter, 0.049, 1.0)
    assert site.looks(5) == []


def test_after_slow_streams_it_grows_when_others_were_fast_enough_or_none_ended_for_a_while() -> None:
    site = Site(bound(100, objective=0.05))
    site.look()
    stream(site.limiter, 0.0625, 3.0)
    site.look()
    site.look()
    assert site.look() is None
    stream(site.limiter, 0.03, 9.0)
    assert reason_of(site.look()) is LimitReason.ROOM
    stream(site.limiter, 0.3, 10.0, times=20)
    site.look()
    assert site.looks(14) == []
    assert reason_of(site.look()) is LimitReason.ROOM


def test_it_grows_by_an_eighth_when_it_is_full_and_clean() -> None:
    site = Site(bound(100))
    site.limiter.limit = 8
    assert [move.after for move in site.looks(40)][:4] == [9, 10, 11, 12]
    assert site.limiter.limit == 100
    assert site.looks(5) == []


def test_it_does_not_grow_when_places_are_free() -> None:
    site = Site(bound(100))
    site.limiter.limit = 50
    assert site.look(in_flight=43) is None
    assert reason_of(site.look(in_flight=44)) is LimitReason.ROOM


def test_slots_that_are_kept_for_some_do_not_keep_it_from_growing() -> None:
    for limit in range(1, 300):
        site = Site(bound(1000))
        site.limiter.limit = limit
        assert reason_of(site.look(in_flight=limit - guarded_slots(limit))) is LimitReason.ROOM


def test_it_does_not_grow_when_the_kv_cache_is_nearly_full() -> None:
    site = Site(bound(100))
    site.limiter.limit = 50
    assert site.look(kv_usage=0.92) is None
    assert reason_of(site.look(kv_usage=0.85)) is LimitReason.ROOM


def test_a_level_that_was_too_much_is_approached_slowly_and_passed_in_growing_steps() -> None:
    site = Site(bound(200))
    site.limiter.limit = 100
    site.look(in_flight=50)
    site.look(preempted=50)
    assert [move.after for move in site.looks(7)] == [93, 95, 97, 98, 99, 100]
    moves = site.looks(40)
    assert [move.after for move in moves[:4]] == [101, 103, 107, 115]
    held = [late.at_seconds - early.at_seconds for early, late in pairwise(moves[:4])]
    assert held == [6.0, 6.0, 6.0]


def test_an_unknown_upper_bound_is_learned() -> None:
    site = Site(bound(None), seats=600)
    site.looks(60)
    assert 590 <= site.limiter.limit <= 615
    assert site.limiter.upper >= 600


def test_a_learned_bound_does_not_grow_while_requests_wait_inside() -> None:
    site = Site(bound(None), seats=254)
    assert site.looks(20) == []
    assert site.limiter.upper == 256


def test_counters_that_go_backwards_are_a_restart() -> None:
    site = Site(bound(None), seats=600)
    site.looks(30)
    assert site.limiter.upper > 256
    site.look(preempted=3)
    site.seen = replace(site.seen, preemptions=0.0)
    assert reason_of(site.limiter.observe(replace(site.seen, at_seconds=100.0))) is LimitReason.RESTART
    assert (site.limiter.limit, site.limiter.upper, site.limiter.pace_seconds) == (256, 256, 0.0)


def test_traffic_of_others_alone_moves_nothing() -> None:
    site = Site(bound(64), seats=64)
    site.foreign = 500
    assert [site.look(in_flight=0, preempted=1) for _ in range(10)] == [None] * 10


def test_beside_the_traffic_of_others_a_part_is_left() -> None:
    site = Site(bound(256), seats=256)
    site.foreign = 4000
    for _ in range(100):
        site.look(preempted=100)
    assert site.limiter.limit == 8


def test_it_falls_to_one_where_no_more_fits() -> None:
    site = Site(bound(256), seats=1)
    site.look()
    for _ in range(100):
        site.look(preempted=1)
    assert site.limiter.limit == 1


def test_one_that_is_not_adaptive_stays_at_the_bound() -> None:
    limiter = Limiter(adaptive=False)
    limiter.bind(100, 1)
    site = Site(limiter, seats=10)
    assert [site.look(preempted=1) for _ in range(10)] == [None] * 10
    assert limiter.limit == 100


def test_samples_before_and_after_a_gap_are_not_compared() -> None:
    site = Site(bound(100))
    site.look()
    site.limiter.observe(None)
    assert site.look(preempted=70) is None
    assert reason_of(site.look(preempted=50)) is LimitReason.PREEMPTIONS


@pytest.mark.parametrize("start", [8, 256])
@pytest.mark.parametrize("seats", [3, 20, 64, 200])
def test_it_settles_where_a_few_wait_wherever_it_started(start: int, seats: int) -> None:
    site = Site(bound(256), seats)
    site.limiter.limit = start
    site.looks(300)
    for _ in range(50):
        site.look()
        assert site.seen.waiting <= 6
        assert site.seen.running >= 0.98 * min(seats, 256)


class LimiterMachine(RuleBasedStateMachine):
    """Whatever an engine, its other clients and the gateway's own do."""

    @initialize(
        known=st.none() | st.integers(1, 600),
        engines=st.integers(1, 4),
        objective=st.none() | st.floats(0.01, 0.2),
    )
    def begin(self, known: int | None, engines: int, objective: float | None) -> None:
        self.limiter = Limiter(itl_objective_seconds=objective)
        self.limiter.bind(known, engines)
        self.now = 0.0
        self.preemptions = 0.0
        self.sent = 0
        self.last: Telemetry | None = None
        self.slow = 0

    @rule(
        running=st.integers(0, 2000),
        waiting=st.integers(0, 2000),
        preempted=st.integers(0, 3),
        usage=st.floats(0, 1),
        share=st.sampled_from([0.0, 0.3, 0.8, 0.95, 1.0, 1.3]),
        seconds=st.floats(0, 30),
        behind=st.sampled_from([0, 0, 5, 100]),
    )
    def look(
        self, running: int, waiting: int, preempted: int, usage: float, share: float, seconds: float, behind: int
    ) -> None:
        self.now += seconds
        self.preemptions += preempted
        self.sent += running // 10
        in_flight = math.ceil(self.limiter.limit * share)
        look = Telemetry(
            self.now,
            running=running,
            waiting=waiting,
            preemptions=self.preemptions,
            kv_usage=usage,
            in_flight=in_flight,
            sent=self.sent,
            behind_prefill=behind,
        )
        before, had = self.limiter.limit, self.limiter.last_change
        move = self.limiter.observe(look)
        assert (move is None) == (self.limiter.limit == before)
        if move is None:
            assert self.limiter.last_change is had
        else:
            assert move == LimitChange(self.now, move.reason, before, after=self.limiter.limit)
            assert self.last is not None
            self.judge(move, look, self.last)
        self.last = look

    def judge(self, move: LimitChange, look: Telemetry, last: Telemetry) -> None:
        """Whether the looks explain the move."""
        if move.after > move.before:
            assert move.reason is LimitReason.ROOM
            if min(look.waiting, last.waiting) > 0:
                return  # maybe the return from a fall for requests that do not wait
            assert look.in_flight >= move.before - max(1, move.before // 8)
            assert look.kv_usage <= 0.9
            assert move.after <= move.before + max(1, move.before // 8)
            return
        assert move.reason in FALLS
        assert look.in_flight > 0
        assert move.after >= min(move.before, look.in_flight) // 2
        if move.reason is LimitReason.PREEMPTIONS:
            assert look.kv_usage > 0.9
        elif move.reason is LimitReason.WAITING:
            assert min(look.waiting, last.waiting) > 2 + look.behind_prefill
        else:
            assert self.slow > 0

    @rule(tpot=st.floats(0.001, 1), lived=st.floats(0.1, 60), times=st.integers(1, 10))
    def streams(self, tpot: float, lived: float, times: int) -> None:
        for _ in range(times):
            self.limiter.streamed(tpot, self.now - lived, self.now)
        self.slow += times

    @rule(known=st.none() | st.integers(1, 600), engines=st.integers(1, 4))
    def bind(self, known: int | None, engines: int) -> None:
        self.limiter.bind(known, engines)

    @rule()
    def lose(self) -> None:
        self.limiter.observe(None)
        self.last = None

    @precondition(lambda self: self.last is not None and self.preemptions > 0)
    @rule()
    def restart(self) -> None:
        self.preemptions = 0.0
        self.now += LOOK_SECONDS
        self.last = Telemetry(
            self.now, running=0, waiting=0, preemptions=0.0, kv_usage=0.0, in_flight=0, sent=self.sent
        )
        self.limiter.observe(self.last)
        assert self.limiter.limit == self.limiter.upper
        assert self.limiter.pace_seconds == 0.0

    @precondition(lambda self: self.last is not None)
    @rule()
    def recovers(self) -> None:
        """Full and clean for long enough, any limit is back at its bound."""
        limiter = self.limiter
        for _ in range(2000):
            self.now += LOOK_SECONDS
            limit = limiter.limit
            limiter.streamed(0.001, self.now, self.now)
            limiter.observe(
                Telemetry(
                    self.now,
                    running=limit,
                    waiting=0,
                    preemptions=self.preemptions,
                    kv_usage=0.5,
                    in_flight=limit,
                    sent=self.sent,
                )
            )
            if limiter.limit >= limiter.upper:
                break
        assert limiter.limit == limiter.upper
        limit = limiter.limit
        self.last = Telemetry(
            self.now,
            running=limit,
            waiting=0,
            preemptions=self.preemptions,
            kv_usage=0.5,
            in_flight=limit,
            sent=self.sent,
        )

    @invariant()
    def stays_within_its_bounds(self) -> None:
        assert 1 <= self.limiter.limit <= self.limiter.upper


TestLimiterMachine = LimiterMachine.TestCase
