"""Continuous batching: times against arithmetic, limits, prefix hits, preemption."""

import math

import pytest

from loadtest.engine.kv_cache import SequenceState, State
from loadtest.engine.scheduler import Limits, Scheduler
from loadtest.engine.step_time import StepTime
from tests.unit.loadtest.engine.support import VirtualEngine

TIME = StepTime(
    8e-3, 28e-6, per_attention_pair_seconds=1.3e-9, per_decode_sequence_seconds=14e-6, per_context_token_seconds=47e-9
)
FOREVER = math.inf


def engine(**limits: int) -> VirtualEngine:
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "num_blocks": 64}
    return VirtualEngine(Limits(**{**defaults, **limits}), TIME)


def sequence(number: int, prompt: int, output: int, family: int | None = None, block_size: int = 4) -> SequenceState:
    first = (number if family is None else family) * 1_000_000
    keys = [first + block for block in range(prompt // block_size)]
    output_keys = [first + block for block in range(prompt // block_size, (prompt + output) // block_size)]
    return SequenceState(number, prompt, output, prompt_keys=keys, output_keys=lambda: output_keys)


def prefill_seconds(prompt: int, budget: int) -> float:
    """Chunked prefill of a lone prompt."""
    total, computed = 0.0, 0
    while computed < prompt:
        chunk = min(budget, prompt - computed)
        total += TIME.base_seconds + TIME.prefill_seconds(chunk, computed)
        computed += chunk
    return total


def decode_seconds(prompt: int, output: int) -> float:
    """Decoding of a lone sequence: the first token came with the prefill."""
    return sum(TIME.base_seconds + TIME.decode_seconds(1, prompt + step) for step in range(output - 1))


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (10, 5), (64, 2), (65, 33), (200, 50)])
def test_a_single_request_takes_the_time_that_arithmetic_says(prompt: int, output: int) -> None:
    run = engine(num_blocks=200)
    alone = sequence(1, prompt, output)
    run.submit(alone)
    assert run.advance(FOREVER) == [alone]
    first = prefill_seconds(prompt, 64)
    assert alone.first_token_seconds == pytest.approx(first, rel=1e-12)
    assert alone.finished_seconds == pytest.approx(first + decode_seconds(prompt, output), rel=1e-9)


def test_an_h100_answers_a_thousand_token_prompt_in_the_modelled_time() -> None:
    run = VirtualEngine(Limits(), TIME)
    alone = sequence(1, 1000, 101, block_size=16)
    run.submit(alone)
    run.advance(FOREVER)
    pairs = 1000 * 1001 / 2
    assert alone.first_token_seconds == pytest.approx(8e-3 + 28e-6 * 1000 + 1.3e-9 * pairs)
    tpot = (alone.finished_seconds - alone.first_token_seconds) / 100
    assert tpot == pytest.approx(8e-3 + 14e-6 + 47e-9 * (1000 + 49.5))


def test_repeated_decode_steps_end_at_the_same_times_as_single_ones() -> None:
    ends = []
    for horizon in (False, True):
        scheduler = Scheduler(Limits(8, 64, block_size=4, num_blocks=64), TIME)
        members = [sequence(number, 5 + number, 20 + 7 * number) for number in range(4)]
        for member in members:
            scheduler.add(member)
        now = 0.0
        while step := scheduler.schedule(now, FOREVER if horizon else None):
            assert horizon or step.repeat == 1
            now += step.duration_seconds
            scheduler.commit(step, now)
        ends.append([member.finished_seconds for member in members])
        assert scheduler.counters.steps == 41
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def test_nothing_is_left_when_all_has_ended() -> None:
    run = engine()
    for number in range(30):
        run.submit(sequence(number, 3 + number, 1 + number % 9))
    assert len(run.advance(FOREVER)) == 30
    assert repr(run.scheduler) == "<Scheduler 0/8 running, 0 waiting, 0/64 blocks>"
    assert run.scheduler.counters.generation_tokens == sum(1 + number % 9 for number in range(30))
    assert run.scheduler._context_tokens == 0


def test_no_more_sequences_run_than_allowed_and_the_queue_is_served_in_order() -> None:
    run = engine(max_num_seqs=2)
    members = [sequence(number, 4, 5) for number in range(6)]
    for member in members:
        run.submit(member)
    assert run.advance(FOREVER) == members
    assert run.scheduler.counters.peak_running == 2


def test_a_step_computes_no_more_tokens_than_its_budget() -> None:
    scheduler = Scheduler(Limits(8, 16, block_size=4, num_blocks=64), TIME)
    for number in range(4):
        scheduler.add(sequence(number, 10, 8))
    now = 0.0
    while step := scheduler.schedule(now):
        assert step.decode_sequences + sum(tokens for _, tokens in step.prefills) <= 16
        now += step.duration_seconds
        scheduler.commit(step, now)


def test_a_long_prompt_does_not_stop_those_that_decode() -> None:
    scheduler = Scheduler(Limits(8, 16, block_size=4, num_blocks=64), TIME)
    short, long = sequence(1, 4, 20), sequence(2, 100, 1)
    scheduler.add(short)
    scheduler.commit(scheduler.schedule(0.0) or pytest.fail("nothing scheduled"), 0.1)
    scheduler.add(long)
    step = scheduler.schedule(0.1)
    assert step is not None
    assert (step.decode_sequences, step.prefills) == (1, [(long, 15)])


def test_a_repeated_prompt_hits_all_but_its_last_block() -> None:
    run = engine()
    first, second = sequence(1, 16, 1, family=7), sequence(2, 16, 1, family=7)
    run.submit(first)
    run.advance(FOREVER)
    run.submit(second)
    run.advance(FOREVER)
    # All four blocks are cached, but the last token must be computed.
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)


def test_prompts_scheduled_in_the_same_step_share_their_prefix() -> None:
    run = engine()
    first, second = sequence(1, 17, 1, family=7), sequence(2, 17, 1, family=7)
    run.submit(first)
    run.submit(second)
    run.advance(FOREVER)
    assert second.cached_tokens == 16
    assert run.scheduler.counters.prefix_hits_tokens == 16


def test_the_next_turn_of_a_conversation_hits_the_answer_of_the_last_one() -> None:
    run = engine()
    run.submit(sequence(1, 10, 11, family=7))
    run.advance(FOREVER)
    # 10 + 11 tokens, of which the last was never computed: five full blocks.
    turn = sequence(2, 30, 1, family=7)
    run.submit(turn)
    run.advance(FOREVER)
    assert turn.cached_tokens == 20


def test_without_prefix_caching_nothing_is_hit() -> None:
    run = VirtualEngine(Limits(8, 64, block_size=4, num_blocks=64, prefix_caching=False), TIME)
    for number in range(2):
        run.submit(sequence(number, 16, 3, family=7))
        run.advance(FOREVER)
    assert run.scheduler.counters.prefix_queries_tokens == 0
    assert run.scheduler.pool.num_cached == 0


def test_the_latest_admitted_is_preempted_and_finishes_after_recomputing() -> None:
    run = engine(num_blocks=6)
    old, young = sequence(1, 8, 16), sequence(2, 8, 10)
    run.submit(old)
    run.submit(young)
    assert {member.sequence_id for member in run.advance(FOREVER)} == {1, 2}
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert young.finished_seconds > old.finished_seconds
    assert run.scheduler.counters.generation_tokens == 26
    assert run.scheduler.pool.num_used == 0
    assert (old.recomputed_tokens, young.lost_tokens) == (0, 0)
    assert 0 < young.recomputed_tokens == run.scheduler.counters.recomputed_tokens < 18


def test_a_sequence_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than the whole KV cache"):
        engine(num_blocks=4).submit(sequence(1, 10, 10))


def test_a_pooling_request_ends_with_its_prefill() -> None:
    run = engine()
    pooled = SequenceState(1, 30, 0)
    run.submit(pooled)
    assert run.advance(FOREVER) == [pooled]
    assert pooled.finished_seconds == pytest.approx(TIME.base_seconds + TIME.prefill_seconds(30, 0))
    assert run.scheduler.counters.generation_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_an_abort_gives_everything_back_at_once(steps: int) -> None:
    scheduler = Scheduler(Limits(1, 16, block_size=4, num_blocks=64), TIME)
    running, waiting = sequence(1, 40, 9), sequence(2, 4, 2)
    scheduler.add(running)
    scheduler.add(waiting)
    now = 0.0
    for _ in range(steps):
        step = scheduler.schedule(now)
        assert step is not None
        now += step.duration_seconds
        scheduler.commit(step, now)
    assert scheduler.abort(running)
    assert not scheduler.abort(running)
    assert scheduler.abort(waiting)
    assert repr(scheduler) == "<Scheduler 0/1 running, 0 waiting, 0/64 blocks>"
    assert scheduler.schedule(now) is None
    assert {running.state, waiting.state} == {State.ABORTED}


def test_an_abort_during_a_step_leaves_the_others_alone() -> None:
    scheduler = Scheduler(Limits(4, 64, block_size=4, num_blocks=64), TIME)
    kept, dropped = sequence(1, 8, 3), sequence(2, 8, 3)
    scheduler.add(kept)
    scheduler.add(dropped)
    now = 0.0
    while step := scheduler.schedule(now):
        scheduler.abort(dropped)
        now += step.duration_seconds
        scheduler.commit(step, now)
    assert kept.state is State.FINISHED
    assert scheduler.counters.generation_tokens == 3
    assert scheduler.pool.num_used == 0


def test_a_budget_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        Limits(max_num_seqs=100, max_num_batched_tokens=50)
