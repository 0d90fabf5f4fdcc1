"""Loads in virtual time give what arithmetic gives."""

import pytest

from loadtest.engine.scheduler import Limits
from loadtest.engine.step_time import HOST_SECONDS, StepTime
from loadtest.figures.virtual import Demanded, closed_loop, open_loop

TIME = StepTime(
    1.0, 0.0, per_attention_pair_seconds=0.0, per_decode_sequence_seconds=0.0, per_context_token_seconds=0.0
)
LIMITS = Limits(8, 8192, block_size=16, num_blocks=1000)


def test_users_take_turns_in_a_closed_loop() -> None:
    found = closed_loop([Demanded(10, 5)] * 6, 2, LIMITS, TIME)
    assert found.seconds == 3 * 5
    assert found.tokens_per_second == 6 * 5 / 15
    assert found.requests_per_second == 6 / 15
    assert found.peak_running == 2
    assert len(found.ended) == 6


def test_an_open_loop_sends_at_its_times_and_idles_between_them() -> None:
    found = open_loop([Demanded(10, 2)] * 2, [1.0, 10.0], LIMITS, TIME)
    assert found.seconds == 12
    assert found.ttft_seconds(100) == 1
    assert found.gpu_utilization == pytest.approx(4 * (1 - HOST_SECONDS) / 12)


def test_a_request_that_comes_while_another_decodes_joins_the_next_step() -> None:
    found = open_loop([Demanded(10, 20), Demanded(10, 2)], [0.0, 4.5], LIMITS, TIME)
    assert [one.finished_seconds for one in found.ended] == [7, 20]


def test_latencies_are_those_of_the_prompts_of_a_length_and_of_every_token() -> None:
    time = StepTime(
        1.0, 0.01, per_attention_pair_seconds=0.0, per_decode_sequence_seconds=0.0, per_context_token_seconds=0.0
    )
    found = open_loop([Demanded(10, 11), Demanded(200, 1)], [0.0, 2.0], LIMITS, time)
    assert found.ttft_seconds(50, longest_prompt=100) == pytest.approx(1.1)
    assert found.ttft_seconds(50, shortest_prompt=100) == pytest.approx(3.1)
    assert found.gap_seconds(50) == pytest.approx(1)
    assert found.gap_seconds(100) == pytest.approx(3)
    assert found.ttft_seconds(50, shortest_prompt=1000) == 0


@pytest.mark.parametrize(("prefix", "caching", "ratio"), [(0, True, 0.5), (None, True, 0), (0, False, 0)])
def test_equal_prefixes_are_hit_where_caching_is_on(prefix: int | None, caching: bool, ratio: float) -> None:
    limits = Limits(8, 8192, block_size=16, num_blocks=1000, prefix_caching=caching)
    found = closed_loop([Demanded(320, 2, prefix, prefix_tokens=160)] * 200, 1, limits, TIME)
    assert found.hit_ratio == pytest.approx(ratio, abs=0.01)


def test_what_does_not_fit_is_preempted() -> None:
    found = closed_loop([Demanded(100, 200)] * 4, 4, Limits(8, 8192, block_size=16, num_blocks=40), TIME)
    assert found.preemptions > 0
    assert len(found.ended) == 4
