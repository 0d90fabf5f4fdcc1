"""Copies, rates, turns and crowds."""

from __future__ import annotations

import math

import pytest

from loadtest.replay.workload import FlashCrowd, copies_for, requests_of, turns_of
from loadtest.workloads.trace import Row, Trace
from tests.unit.loadtest.replay.builders import BLOCK, conversation_trace, session_trace


def test_the_asked_rate_is_the_rate() -> None:
    trace = conversation_trace(rows=400)
    for engines, rate in ((2, 5.0), (8, 40.0), (16, 33.0)):
        requests = requests_of(trace, engines, rate, seed=0)
        assert len(requests) == 400 * max(1, engines // 4)
        last = max(request.arrival_seconds for request in requests)
        assert len(requests) / last == pytest.approx(rate, rel=0.02)


def test_copies_share_the_common_first_block_and_nothing_else() -> None:
    rows = [Row(float(n), 3 * BLOCK, 5, keys=(0, 10 + n, 100 + n)) for n in range(50)]
    requests = requests_of(Trace("t", rows, BLOCK), engines=12, rate_per_second=1.0, seed=0)
    by_key: dict[int, int] = {}
    for request in requests:
        for key in request.keys:
            by_key[key] = by_key.get(key, 0) + 1
    assert by_key.pop(0) == 150
    assert set(by_key.values()) == {1}
    assert len(by_key) == 300


def test_first_blocks_that_few_share_are_not_common() -> None:
    requests = requests_of(conversation_trace(), engines=8, rate_per_second=1.0, seed=0)
    firsts = {request.keys[0] for request in requests}
    assert len(firsts) == 10


def test_requests_are_numbered_by_arrival_and_rotated_by_seed() -> None:
    trace = conversation_trace()
    ones, others = (requests_of(trace, 4, 10.0, seed) for seed in (0, 1))
    arrivals = [request.arrival_seconds for request in ones]
    assert arrivals == sorted(arrivals)
    assert [request.number for request in ones] == list(range(len(ones)))
    assert [request.prompt_tokens for request in ones] == [row.prompt_tokens for row in trace.rows]
    assert [request.prompt_tokens for request in others] != [row.prompt_tokens for row in trace.rows]


def test_coarse_times_are_spread_over_their_tick() -> None:
    rows = [Row(3.0 * (n // 10), BLOCK, 5, keys=(n,)) for n in range(100)]
    requests = requests_of(Trace("t", rows, BLOCK, tick_seconds=3.0), 1, 10 / 3, seed=0)
    assert len({request.arrival_seconds for request in requests}) == 100


def test_sessions_are_copied_as_often_as_the_rate_needs_and_only_first_turns_arrive() -> None:
    trace = session_trace(sessions=6, turns=4)
    assert copies_for(trace, 8, trace.rate_per_second * 3.5) == 4
    requests = requests_of(trace, 8, trace.rate_per_second * 3.5, seed=0)
    assert len(requests) == 96
    assert sum(request.arrival_seconds < math.inf for request in requests) == 24
    chained = [request.following for request in requests if request.following is not None]
    assert len(chained) == 72
    assert all(after.arrival_seconds == math.inf and after.think_seconds == 0.5 for after in chained)


def test_a_following_turn_shows_the_blocks_of_the_answer() -> None:
    rows = [
        Row(
            0.0, 2 * BLOCK + 40, 100, keys=(1, 2)
        ),  # 268 tokens in all: blocks 3 and 4 are complete but for the last token
        Row(9.0, 6 * BLOCK, 10, keys=(1, 2, 3, 4, 5, 6)),
    ]
    before, after = turns_of(rows, BLOCK)
    assert before.answer_keys == (3, 4)
    assert (after.turn, after.turn_end) == (2, 4)


def test_a_prompt_that_is_too_short_to_hold_the_answer_does_not_continue_it() -> None:
    rows = [Row(0.0, 2 * BLOCK + 40, 400, keys=(1, 2)), Row(9.0, 6 * BLOCK, 10, keys=(1, 2, 3, 4, 5, 6))]
    assert [turn.answer_keys for turn in turns_of(rows, BLOCK)] == [(), ()]


def test_a_shared_opening_is_no_requests_earlier_turn() -> None:
    rows = [Row(0.0, BLOCK + 1, 70, keys=(0,))]
    rows += [Row(float(n), 4 * BLOCK, 10, keys=(0, 10 * n, 10 * n + 1, 10 * n + 2)) for n in range(1, 8)]
    assert all(turn.answer_keys == () for turn in turns_of(rows, BLOCK))


def test_a_flash_crowd_shares_one_new_prefix_in_a_fifth_of_the_time() -> None:
    trace = conversation_trace(rows=500)
    plain = requests_of(trace, 4, 10.0, seed=0)
    crowded = requests_of(trace, 4, 10.0, seed=0, crowd=FlashCrowd())
    assert len(crowded) == 560
    known = {key for request in plain for key in request.keys}
    crowd = [request for request in crowded if request.keys[0] not in known]
    assert len(crowd) == 60
    assert len({request.keys[: 8192 // BLOCK] for request in crowd}) == 1
    assert len({request.keys[-1] for request in crowd}) == 60
    arrivals = [request.arrival_seconds for request in crowd]
    assert 19.5 < min(arrivals) < max(arrivals) < 30.5
