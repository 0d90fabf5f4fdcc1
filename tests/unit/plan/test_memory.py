from dataclasses import replace

import pytest

from gateway.plan.memory import GIB, assumed_reserve, fit, longest_that_starts, weight_bytes
from gateway.plan.model_shape import read_shape
from gateway.plan.quantization import chosen
from tests.unit.plan.models import (
    DEEPSEEK_V3,
    GEMMA2_9B,
    GEMMA3_4B,
    GEMMA3_27B,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_70B,
    MINILM,
    MISTRAL_7B,
    QWEN3_30B,
    Config,
    settings,
)

LLAMA = read_shape(LLAMA_8B)


def test_what_an_engine_logged_on_a_real_gpu_is_met() -> None:
    """vLLM on an H100 with Llama 3 8B, 0.90 of 79.22 GiB, 256 sequences, logged 53.29 GiB of KV cache."""
    found = fit(LLAMA, settings(79.22, utilization=0.9, max_num_seqs=256), 1)
    assert found.budget_bytes / GIB == pytest.approx(71.29, abs=0.01)
    assert found.weight_bytes / GIB == pytest.approx(14.96, abs=0.01)
    assert found.kv_bytes / GIB == pytest.approx(53.29, rel=0.02)


def test_a_split_cache_on_real_gpus_is_met() -> None:
    """vLLM with Qwen3 235B on 4 GPUs made 178,880 tokens of 8.11 GiB on each."""
    shape = read_shape(
        QWEN3_30B
        | {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536}
    )
    found = fit(shape, settings(8.11, utilization=1, weight_bytes=0, reserve_bytes=0), 4)
    assert found.kv_tokens == pytest.approx(178_880, rel=0.02)


@pytest.mark.parametrize(
    ("config", "length", "batched", "tokens"),
    [
        (LLAMA_8B, 131072, 8192, 327_680),
        (MISTRAL_7B, 32768, 8192, 523_878),
        (GEMMA2_9B, 8192, 8192, 124_702),
        (GEMMA3_27B, 131072, 8192, 291_658),
        (GEMMA3_4B, 32768, 2048, 1_080_766),
        (GPT_OSS_20B, 131072, 8192, 1_551_920),
    ],
)
def test_tokens_are_those_that_vllms_own_code_counts(config: Config, length: int, batched: int, tokens: int) -> None:
    """Of 40 GiB of KV cache, by its grouping of layers; less the block that it keeps to itself."""
    given = settings(40, utilization=1, weight_bytes=0, reserve_bytes=0)
    found = fit(read_shape(config), replace(given, max_length_tokens=length, batched_tokens=batched), 1)
    assert tokens - 32 <= found.kv_tokens <= tokens


def test_what_is_left_is_the_kv_cache() -> None:
    found = fit(LLAMA, settings(utilization=0.5, reserve_bytes=2 * GIB), 1)
    assert found.kv_bytes == 40 * GIB - 2 * LLAMA.parameters.total - 2 * GIB
    assert found.pool.blocks == found.kv_bytes // (16 * 128 * 1024) - 1  # vLLM keeps one to itself
    assert found.kv_tokens == found.pool.blocks * 16


def test_splitting_leaves_more_than_twice_the_cache() -> None:
    one, two = (fit(LLAMA, settings(reserve_bytes=GIB), split) for split in (1, 2))
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2)
    assert two.kv_tokens > 2 * one.kv_tokens


def test_the_checkpoint_decides_over_the_count() -> None:
    assert weight_bytes(LLAMA, settings(weight_bytes=7)) == 7
    assert weight_bytes(LLAMA, settings(quantization=chosen("fp8", None))) < LLAMA.parameters.total * 1.2


def test_weights_that_do_not_fit_leave_nothing() -> None:
    found = fit(read_shape(LLAMA_70B), settings(), 1)
    assert not found.weights_fit
    assert not found.starts
    assert (found.pool.blocks, found.kv_tokens) == (0, 0)


def test_an_engine_starts_only_with_room_for_one_longest_sequence() -> None:
    small = settings(24, max_length_tokens=131072)
    assert fit(LLAMA, small, 1).weights_fit
    assert not fit(LLAMA, small, 1).starts
    length = longest_that_starts(LLAMA, small, 1)
    assert fit(LLAMA, replace(small, max_length_tokens=length), 1).starts
    assert not fit(LLAMA, replace(small, max_length_tokens=length + 1), 1).starts
    assert longest_that_starts(read_shape(LLAMA_70B), settings(), 1) == 0


def test_an_encoder_starts_without_a_cache() -> None:
    found = fit(read_shape(MINILM), settings(8), 1)
    assert found.starts
    assert found.kv_tokens == 0


def test_working_memory_grows_with_batches_and_sequences() -> None:
    base = assumed_reserve(LLAMA, settings(), 1)
    assert assumed_reserve(LLAMA, settings(batched_tokens=16384), 1) > base
    assert base - assumed_reserve(LLAMA, settings(max_num_seqs=24), 1) == 1000 * 128256 * 8
    assert assumed_reserve(LLAMA, settings(), 2) > base - GIB  # less of each layer, but NCCL


def test_a_latent_cache_gains_only_by_the_weights_that_others_hold() -> None:
    shape = read_shape(DEEPSEEK_V3)
    found = fit(shape, settings(141, max_length_tokens=163840, block_tokens=64, quantization=shape.quantization), 8)
    assert found.kv_tokens == pytest.approx(found.kv_bytes / 70272, rel=0.001)
