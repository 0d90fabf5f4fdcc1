"""vLLM's switches of batching: chunked prefill, static groups, tensor parallelism, and the presets' figures."""

import math

import pytest
from pydantic import ValidationError

from loadtest.engine.command import SimOptions
from loadtest.engine.config import EngineConfig
from loadtest.engine.scheduler import Batching, Limits
from loadtest.engine.step_time import PRESETS, Preset, StepTime, kv_tokens
from loadtest.figures.virtual import Demanded, closed_loop, open_loop
from tests.unit.loadtest.engine.support import VirtualEngine
from tests.unit.loadtest.engine.test_scheduler import sequence

TIME = StepTime(
    1.0, 0.01, per_attention_pair_seconds=0.0, per_decode_sequence_seconds=0.0, per_context_token_seconds=0.0
)
FOREVER = math.inf


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_has_room_for_all_of_it() -> None:
    ends = {}
    for chunked in (True, False):
        run = VirtualEngine(
            Limits(8, 64, block_size=4, num_blocks=64, prefix_caching=False, chunked_prefill=chunked), TIME
        )
        first, second = sequence(1, 40, 1), sequence(2, 40, 1)
        run.submit(first)
        run.submit(second)
        run.advance(FOREVER)
        ends[chunked] = first.first_token_seconds, second.first_token_seconds
    assert ends[True] == pytest.approx((1.64, 2.8))  # 40 + 24 tokens, then 16
    assert ends[False] == pytest.approx((1.4, 2.8))  # 40, then 40


def test_without_chunked_prefill_only_what_the_cache_lacks_needs_room() -> None:
    run = VirtualEngine(Limits(8, 64, block_size=4, num_blocks=64, chunked_prefill=False), TIME)
    first, again = sequence(1, 60, 1, family=7), sequence(2, 60, 1, family=7)
    run.submit(first)
    run.submit(again)
    run.advance(FOREVER)
    assert again.cached_tokens == 56
    assert again.first_token_seconds == first.first_token_seconds


def test_a_long_prompt_delays_the_tokens_of_others_unless_it_is_chunked() -> None:
    longest = {}
    for chunked in (True, False):
        limits = Limits(8, 512 if chunked else 8192, block_size=16, num_blocks=2000, chunked_prefill=chunked)
        asked = [Demanded(16, 400), Demanded(8000, 2)]
        longest[chunked] = open_loop(asked, [0.0, 1.0], limits, PRESETS["h100-8b"]).gap_seconds(100)
    assert longest[False] > 5 * longest[True]


def test_a_static_group_ends_with_its_longest_answer_and_nothing_joins_it_before() -> None:
    started = {}
    for batching in Batching:
        run = VirtualEngine(
            Limits(2, 64, block_size=4, num_blocks=64, batching=batching),
            StepTime(
                1.0, 0.0, per_attention_pair_seconds=0.0, per_decode_sequence_seconds=0.0, per_context_token_seconds=0.0
            ),
        )
        members = [sequence(1, 4, 2), sequence(2, 4, 10), sequence(3, 4, 2)]
        for member in members:
            run.submit(member)
        run.advance(FOREVER)
        started[batching] = [member.first_token_seconds for member in members]
    assert started[Batching.CONTINUOUS] == [1, 1, 3]
    assert started[Batching.STATIC] == [1, 1, 11]


def test_a_static_group_is_prefilled_as_a_whole() -> None:
    run = VirtualEngine(Limits(4, 64, block_size=4, num_blocks=64, batching=Batching.STATIC), TIME)
    members = [sequence(number, 40, 2) for number in range(4)]
    for member in members:
        run.submit(member)
    run.advance(FOREVER)
    assert [member.first_token_seconds for member in members] == pytest.approx([1 + 4 * 0.4] * 4)


def test_continuous_batching_answers_several_times_as_much_as_static_groups_of_mixed_lengths() -> None:
    asked = [Demanded(64, 2000 if number % 16 == 0 else 100) for number in range(640)]
    rates = [
        closed_loop(
            asked, 32, Limits(32, 8192, block_size=16, num_blocks=27_000, batching=batching), PRESETS["h100-8b"]
        ).tokens_per_second
        for batching in Batching
    ]
    assert rates[0] > 4 * rates[1]


@pytest.mark.parametrize(("users", "measured"), [(1, 95), (8, 620), (32, 2400)])
def test_the_card_decodes_as_fast_as_it_was_measured(users: int, measured: float) -> None:
    limits = Limits(num_blocks=kv_tokens("card-8b") // 16)
    found = closed_loop([Demanded(64, 256)] * (6 * users), users, limits, PRESETS["card-8b"])
    assert found.tokens_per_second == pytest.approx(measured, rel=0.05)


def test_faster_memory_and_more_of_it_make_faster_presets() -> None:
    ascending = ("a100-8b", "h100-8b", "h200-8b")
    tokens = [1 / PRESETS[name].base_seconds for name in ascending]
    assert sorted(tokens) == tokens
    assert kv_tokens("a100-8b") < kv_tokens("h200-8b")
    assert {each.value for each in Preset} == {*PRESETS}


def test_two_gpus_shorten_a_step_by_less_than_half_and_hold_more_than_twice_the_cache() -> None:
    one, two = PRESETS["h100-8b"], PRESETS["h100-8b"].tensor_parallel(2)
    assert one.tensor_parallel(1) is one
    assert one.base_seconds / 2 < two.base_seconds < one.base_seconds
    assert one.prefill_seconds(1000, 0) / 2 < two.prefill_seconds(1000, 0) < one.prefill_seconds(1000, 0)
    assert kv_tokens("h100-8b", 2) > 2 * kv_tokens("h100-8b")


def test_the_flags_of_vllm_set_the_engine() -> None:
    plain = SimOptions(port=0).engine
    assert (plain.limits.max_num_batched_tokens, plain.limits.num_blocks) == (8192, 27_000)
    assert plain.limits.prefix_caching
    assert plain.limits.chunked_prefill
    other = SimOptions(
        port=0,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_model_len=32_768,
        tensor_parallel_size=2,
        batching=Batching.STATIC,
    ).engine
    assert other.limits == Limits(
        256,
        32_768,
        block_size=16,
        num_blocks=kv_tokens("h100-8b", 2) // 16,
        prefix_caching=False,
        chunked_prefill=False,
        batching=Batching.STATIC,
    )
    assert other.step_time == PRESETS["h100-8b"].tensor_parallel(2)


def test_a_prompt_that_no_step_could_compute_is_refused_at_the_start() -> None:
    options = SimOptions(port=0, enable_chunked_prefill=False, max_num_batched_tokens=4096)
    with pytest.raises(ValueError, match="smaller than max_model_len"):
        _ = options.engine
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        EngineConfig(limits=Limits(chunked_prefill=False), max_model_len=10_000)
    with pytest.raises(ValidationError):
        SimOptions(port=0, batching="dynamic")  # type: ignore[arg-type]
