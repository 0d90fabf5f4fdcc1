import pytest

from gateway.config import AdmissionConfig
from gateway.features.plan.capacity import (
    GIB,
    KV_HEADROOM,
    Plan,
    defaults,
    make_plan,
    recommended,
    rows,
    startable_length,
)
from gateway.features.plan.model import read_shape
from tests.unit.plan.models import LLAMA_8B, LLAMA_70B, MINILM, QWEN25_7B, settings, workload

LLAMA = read_shape(LLAMA_8B)


def splits(plan: Plan) -> list[tuple[int, int]]:
    return [(option.replicas, option.tensor_parallel) for option in plan.options]


def test_every_way_to_use_the_gpus_is_shown() -> None:
    assert splits(make_plan(LLAMA, settings(), workload(), 8)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert splits(make_plan(LLAMA, settings(), workload(), 6)) == [(6, 1), (3, 2), (1, 4)]
    assert splits(make_plan(read_shape(QWEN25_7B), settings(), workload(), 8)) == [(8, 1), (4, 2), (2, 4)]
    assert splits(make_plan(LLAMA, settings(), workload(), 8, (2,))) == [(4, 2)]


def test_the_least_split_that_holds_the_expected_requests_is_taken() -> None:
    def chosen(**more: int) -> int | None:
        choice = make_plan(LLAMA, settings(24), workload(**more), 8).choice
        return choice and choice.tensor_parallel

    assert chosen(concurrency=100) == 1
    assert chosen(concurrency=300) == 2


def test_without_a_concurrency_a_split_is_worth_it_if_it_doubles_what_fits() -> None:
    small, large = (make_plan(LLAMA, settings(size), workload(), 8) for size in (24, 80))
    one, two, *_ = small.options
    assert two.fleet_sequences > 2 * one.fleet_sequences
    assert [plan.choice.tensor_parallel for plan in (small, large) if plan.choice] == [2, 1]


def test_if_no_split_holds_them_the_roomiest_is_taken() -> None:
    plan = make_plan(LLAMA, settings(24), workload(concurrency=100_000), 8)
    assert plan.choice is max(plan.options, key=lambda option: option.fleet_sequences)


def test_a_large_model_is_split() -> None:
    plan = make_plan(read_shape(LLAMA_70B), settings(), workload(), 8)
    assert plan.choice is not None
    assert (plan.choice.tensor_parallel, plan.choice.replicas) == (4, 2)
    assert [option.starts for option in plan.options] == [False, True, True, True]


def test_nothing_is_chosen_where_nothing_fits() -> None:
    assert make_plan(read_shape(LLAMA_70B), settings(24), workload(), 2).choice is None


def test_sequences_of_the_fleet_are_those_of_all_backends() -> None:
    [one, *_] = make_plan(LLAMA, settings(), workload(), 8).options
    assert one.sequences == one.cache.sequences(1024)
    assert one.fleet_sequences == 8 * one.sequences


def test_max_num_seqs_is_what_fits_in_the_share_that_the_gateway_fills() -> None:
    cache = make_plan(LLAMA, settings(), workload(), 1).options[0].cache
    assert recommended(cache, workload(), 1024) == cache.blocks // 64
    assert recommended(cache, workload(), 256) == 256
    assert recommended(cache, workload(10**7), 256) == 1
    assert AdmissionConfig().kv_headroom == KV_HEADROOM


def test_lengths_go_up_to_the_longest_and_have_the_own_requests_among_them() -> None:
    cache = make_plan(LLAMA, settings(), workload(), 1).options[0].cache
    found = rows(cache, 8192, workload(), 2)
    assert [row["tokens"] for row in found] == [512, 1024, 2048, 8192]
    assert [row["is_workload"] for row in found] == [False, True, False, False]
    assert found[0]["kv_bytes"] == 512 * 128 * 1024 * 2
    assert [row["sequences"] for row in found] == sorted((row["sequences"] for row in found), reverse=True)
    assert [row["tokens"] for row in rows(cache, 600, workload(), None)] == [512, 600]


def test_the_shared_prefix_counts_for_the_own_requests_alone() -> None:
    cache = make_plan(LLAMA, settings(), workload(), 1).options[0].cache
    plain, shared = (rows(cache, 8192, workload(shared_prefix_tokens=size), None) for size in (0, 512))
    assert shared[1]["sequences"] == pytest.approx(2 * plain[1]["sequences"], rel=0.01)
    assert shared[2] == plain[2]


def test_vllms_own_limits_follow_the_gpus_memory() -> None:
    assert defaults(24 * GIB) == (256, 2048)
    assert defaults(80 * GIB) == (1024, 8192)
    assert defaults(180 * GIB) == (1024, 16384)


def test_an_encoder_is_not_split() -> None:
    plan = make_plan(read_shape(MINILM), settings(24), workload(), 4)
    assert plan.choice is plan.options[0]
    assert plan.choice.max_num_seqs == 1024


def test_the_length_that_has_room_is_found_only_where_the_whole_has_none() -> None:
    small = make_plan(LLAMA, settings(24, max_length_tokens=131072), workload(), 1)
    assert small.choice is None
    assert 25_000 < startable_length(small) < 50_000
    assert startable_length(small) % 1024 == 0
    assert startable_length(make_plan(LLAMA, settings(), workload(), 1)) == 0
