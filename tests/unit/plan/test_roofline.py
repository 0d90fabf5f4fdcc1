"""Tokens per second by batch: against the simulated engine's fitted times, and against what must hold of any GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.features.plan.capacity import GIB, Settings, make_plan
from gateway.features.plan.command import PlanRequest, plan_model, workload_of
from gateway.features.plan.gpus import GPUS, gpu_of, preset
from gateway.features.plan.model import PlanError, read_shape
from gateway.features.plan.roofline import BatchSpeed, Roofline, batch_curve, fleet_tokens_per_second
from loadtest.engine.step_time import PRESETS
from tests.unit.plan.models import LLAMA_8B, LLAMA_70B, MIXTRAL, Config, settings, workload

ASKED = PlanRequest(
    "",
    gpu_memory_gib=None,
    gpus=1,
    tensor_parallel=None,
    utilization=0.92,
    max_model_len=None,
    dtype="auto",
    kv_cache_dtype="auto",
    quantization="auto",
    max_num_seqs=None,
    batched_tokens=None,
    block_tokens=None,
    reserve_gib=None,
    fields=(),
)
TYPICAL = workload_of(1024, 256, 0, None)


def line(gpu: str = "h100", config: Config = LLAMA_8B, **more: Any) -> Roofline:
    return Roofline(read_shape(config), settings(), gpu_of(gpu), **more)


def at(batch: int, gpu: str = "h100", config: Config = LLAMA_8B, prompt: int = 64, **more: Any) -> BatchSpeed:
    return line(gpu, config, **more).at(batch, workload_of(prompt, 256, 0, None))


def planned(**asked: Any) -> dict[str, Any]:
    return plan_model(replace(ASKED, **{"preset": "llama-3.1-8b", "gpu": "h100"} | asked), TYPICAL)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_the_simulated_engines_have_the_same_speeds(gpu: str) -> None:
    modelled, simulated = line(gpu), PRESETS[f"{gpu}-8b"]
    alone = sum(modelled.decode_parts(1, 0).values())
    assert alone == pytest.approx(simulated.base_seconds + simulated.decode_seconds(1, 0), rel=0.03)
    assert modelled.compute_seconds(1000) == pytest.approx(1000 * simulated.per_prefill_token_seconds, rel=0.08)
    assert modelled.prefill_seconds(8000) == pytest.approx(simulated.prefill_seconds(8000, 0), rel=0.08)
    cached = modelled.decode_parts(1, 100_000)["reading the KV cache"]
    assert cached == pytest.approx(100_000 * simulated.per_context_token_seconds, rel=0.03)


def test_a_batch_multiplies_the_throughput_until_something_else_than_the_weights_takes_the_time() -> None:
    one, eight, many = at(1), at(8), at(512)
    assert (one.limit, many.limit) == ("reading weights", "computing")
    assert eight.tokens_per_second > 7 * one.tokens_per_second
    assert many.tokens_per_second < 256 * one.tokens_per_second
    assert one.seconds_per_token < eight.seconds_per_token < many.seconds_per_token
    assert at(256, prompt=8192).limit == "prefill"
    cached = line().at(64, workload_of(32_000, 256, 32_000, None))
    assert cached.limit == "reading the KV cache"


def test_every_gpu_is_as_fast_as_its_memory_for_one_request() -> None:
    by_bandwidth = sorted(GPUS, key=lambda name: GPUS[name].bytes_per_second)
    rates = [at(1, name, prompt=1).tokens_per_second for name in by_bandwidth]
    assert rates == sorted(rates)


def test_a_shared_prefix_is_computed_once() -> None:
    asked = workload_of(2048, 256, 0, None)
    shared = replace(asked, shared_prefix_tokens=2000)
    assert line().at(64, shared).tokens_per_second > 1.8 * line().at(64, asked).tokens_per_second


def test_splitting_a_small_model_serves_less_than_copies_of_it_and_a_large_one_gains() -> None:
    asked = workload(1280)
    plan = make_plan(read_shape(LLAMA_8B), settings(), asked, 4)
    fleet = [fleet_tokens_per_second(line(tensor_parallel=one.tensor_parallel), one, asked) for one in plan.options]
    assert fleet == sorted(fleet, reverse=True)
    large = [at(16, config=LLAMA_70B, tensor_parallel=size).seconds_per_token for size in (2, 4, 8)]
    assert large == sorted(large, reverse=True)


def test_a_pipeline_needs_no_exchange_and_serves_parts_of_the_batch_in_turn() -> None:
    pipeline, split = line(config=LLAMA_70B, pipeline_parallel=4), line(config=LLAMA_70B, tensor_parallel=4)
    assert pipeline.decode_parts(64, 0)["the exchange between GPUs"] == 0 < split.exchange_seconds(64)
    assert at(4, config=LLAMA_70B, tensor_parallel=4).seconds_per_token < (
        at(4, config=LLAMA_70B, pipeline_parallel=4).seconds_per_token
    )


def test_of_experts_those_that_the_batch_uses_are_read() -> None:
    mixture = line(config=MIXTRAL)
    assert mixture.shape.parameters.used_share == 2 / 8
    one, many = mixture.weight_seconds(1), mixture.weight_seconds(64)
    assert 3 * one < many
    assert many == pytest.approx(mixture.weight_seconds(1000), rel=1e-3)


def test_the_curve_ends_with_the_first_size_that_does_not_fit() -> None:
    shape, own = (
        read_shape(LLAMA_8B),
        Settings(
            24 * GIB, max_length_tokens=8192, max_num_seqs=256, batched_tokens=2048, block_tokens=16, kv_value_bytes=2
        ),
    )
    plan = make_plan(shape, own, TYPICAL, 1)
    assert plan.choice
    curve = batch_curve(Roofline(shape, own, gpu_of("rtx-4090")), plan.choice, TYPICAL)
    assert [row.batch for row in curve][-3:] == [16, 32, 64]
    assert [row.fits for row in curve][-2:] == [True, False]


def test_a_plan_by_names_has_memory_speed_and_a_command() -> None:
    found = planned()
    assert found["model"]["name"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert found["gpus"]["memory_bytes"] == int(79.2 * GIB)
    assert found["batches"][0]["batch"] == 1
    assert found["options"][0]["fleet_tokens_per_second"] > 1000
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in found["vllm"]
    assert "batches" not in planned(gpu=None, gpu_memory_gib=80.0)
    assert planned(gpu_memory_gib=40.0)["gpus"]["memory_bytes"] == 40 * GIB


def test_an_a100_has_the_limits_that_vllm_gives_it() -> None:
    assert [planned(gpu=name)["max_num_batched_tokens"] for name in ("a100", "h100")] == [2048, 8192]


def test_a_pipeline_splits_layers_weights_and_cache() -> None:
    flat, staged = (planned(preset="llama-3.1-70b", gpus=8, pipeline_parallel=size) for size in (1, 2))
    [two] = [option for option in staged["options"] if option["tensor_parallel"] == 2]
    [four] = [option for option in flat["options"] if option["tensor_parallel"] == 4]
    assert (two["replicas"], two["pipeline_parallel"]) == (2, 2)
    assert two["gpu_bytes"]["weights"] == pytest.approx(four["gpu_bytes"]["weights"], rel=0.02)
    assert two["kv_tokens"] == pytest.approx(four["kv_tokens"], rel=0.06)
    assert "--pipeline-parallel-size 2" in staged["vllm"]
    assert [option["tensor_parallel"] for option in staged["options"]] == [1, 2, 4]


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.2-3b", "qwen3-8b", "qwen3-32b", "mistral-7b"])
def test_a_preset_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    wanted = float(name.rpartition("-")[2].rstrip("b")) * 1e9
    assert read_shape(preset(name)).parameters.total == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"gpu": "h9000"}, "--gpu h9000: give one of a10, a100"),
        ({"preset": "llama"}, "--preset llama: give one of llama-3.1-8b"),
        ({"model": str(Path("m"))}, "give MODEL or --preset llama-3.1-8b, not both"),
        ({"preset": None}, "give a model: its folder"),
        ({"gpu": None}, "give --gpu-memory-gib, the memory of one GPU"),
        ({"pipeline_parallel": 2}, "--pipeline-parallel-size 2 needs as many GPUs: give --gpus 2"),
        ({"pipeline_parallel": 33, "gpus": 40}, "more than the model's 32 layers"),
        ({"pipeline_parallel": 2, "gpus": 2, "tensor_parallel": 2}, "give --gpus 4"),
    ],
)
def test_names_and_sizes_that_cannot_be_are_refused(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        planned(**asked)
