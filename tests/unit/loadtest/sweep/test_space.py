"""Which configurations a plan comes to."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.sweep.plan import FlagValue, parse
from loadtest.sweep.space import Space, flags_in, gpus_of, space_of, spelled


def space(flags: dict[str, list[Any]], **changes: Any) -> Space:
    workloads = [{"name": "short", "run": {"concurrency": 8}}]
    plan = {"serve": {"command": ["vllm", "serve", "m"]}, "workloads": workloads, "flags": flags}
    return space_of(parse(plan | changes))


def labels(found: Space) -> list[str]:
    return [configuration.label for configuration in found.configurations]


def test_every_combination_is_there_once_in_the_plans_order() -> None:
    found = space({"max-num-seqs": [4, 16], "enable-prefix-caching": [True, False]})
    assert labels(found) == [
        "max-num-seqs=4 enable-prefix-caching=on",
        "max-num-seqs=4 enable-prefix-caching=off",
        "max-num-seqs=16 enable-prefix-caching=on",
        "max-num-seqs=16 enable-prefix-caching=off",
    ]
    assert found.left_out == []


def test_no_flags_are_one_configuration() -> None:
    assert labels(space({})) == ["as it is"]


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("max-num-seqs", 4, ["--max-num-seqs", "4"]),
        ("enable-chunked-prefill", True, ["--enable-chunked-prefill"]),
        ("enable-chunked-prefill", False, ["--no-enable-chunked-prefill"]),
        ("compilation-config.use_cudagraph", False, ["--compilation-config.use_cudagraph=false"]),
        ("max-num-seqs", None, []),
        ("speculative-config", {"n": 2}, ["--speculative-config", '{"n":2}']),
        ("gpu-memory-utilization", 0.9, ["--gpu-memory-utilization", "0.9"]),
    ],
)
def test_a_value_is_spelled_as_vllm_reads_it(flag: str, value: FlagValue, words: list[str]) -> None:
    assert spelled(flag, value) == words


@pytest.mark.parametrize(
    ("flags", "changes", "why"),
    [
        ({"tensor-parallel-size": [4], "pipeline-parallel-size": [2]}, {"gpus": 4}, "it needs 8 GPUs of 4"),
        (
            {"max-num-seqs": [64], "max-num-batched-tokens": [32]},
            {},
            "max-num-batched-tokens 32 is below max-num-seqs 64",
        ),
        (
            {"enable-chunked-prefill": [False], "max-num-batched-tokens": ["2k"], "max-model-len": ["8K"]},
            {},
            "without chunked prefill, max-num-batched-tokens 2000 must hold max-model-len 8192",
        ),
        (
            {"enable-chunked-prefill": [False], "max-num-batched-tokens": [0]},
            {},
            "max-num-batched-tokens 0 computes nothing: give 1 or more, or null for the default",
        ),
        ({"gpu-memory-utilization": [1.5]}, {}, "gpu-memory-utilization 1.5 is not above 0 and at most 1"),
        ({"max-num-seqs": [4]}, {"exclude": [{"max_num_seqs": 4}]}, "excluded by the plan"),
    ],
)
def test_what_vllm_would_refuse_is_left_out(flags: dict[str, list[Any]], changes: dict[str, Any], why: str) -> None:
    found = space(flags, **changes)
    assert labels(found) == []
    assert [reported for _, reported in found.left_out] == [why]


def test_what_is_not_known_to_be_refused_is_tried() -> None:
    assert len(space({"max-num-seqs": [64], "tensor-parallel-size": [8]}).configurations) == 1
    chunked = {"enable-chunked-prefill": [True, None], "max-num-batched-tokens": [2048], "max-model-len": [8192]}
    assert len(space(chunked).configurations) == 2


def test_the_servers_own_command_counts_where_the_plan_says_nothing() -> None:
    serve = {"command": ["vllm", "serve", "m", "--max-num-seqs=64", "-tp", "2"]}
    found = space({"max-num-batched-tokens": [32, 128], "max-num-seqs": [None, 16]}, serve=serve, gpus=2)
    assert [why for _, why in found.left_out] == ["max-num-batched-tokens 32 is below max-num-seqs 64"]
    assert space({"max-num-seqs": [16]}, serve=serve, gpus=1).configurations == []


def test_an_exclusion_reports_one_from_true() -> None:
    found = space({"a": [1, True]}, exclude=[{"a": True}])
    assert labels(found) == ["a=1"]


def test_flags_are_read_off_a_command_line() -> None:
    words = ["vllm", "serve", "m", "--max-model-len", "8K", "--no-enable-chunked-prefill", "--x_y=0.5", "--last"]
    assert flags_in(words) == {"max-model-len": "8K", "enable-chunked-prefill": False, "x-y": 0.5, "last": True}


def test_gpus_are_the_product_of_all_parallel_sizes() -> None:
    sizes = {"tensor-parallel-size": 2, "pipeline-parallel-size": 3, "data-parallel-size": 4, "max-num-seqs": 5}
    assert gpus_of(sizes) == 24
    assert gpus_of({}) == 1
