from dataclasses import replace

import pytest

from gateway.features.plan.capacity import (
    GIB,
    KvCache,
    assumed_reserve,
    bytes_per_sequence,
    default_block_tokens,
    fit,
    kv_cache,
    longest_that_starts,
)
from gateway.features.plan.model import chosen, read_shape
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
    QWEN25_7B,
    Config,
    settings,
)

LLAMA = read_shape(LLAMA_8B)

WHOLE = KvCache(16, 1024, (None,), blocks=1000)
WINDOW = KvCache(16, 1024, (None, 64), blocks=1000)


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
    assert found.cache.blocks == found.kv_bytes // (16 * 128 * 1024) - 1  # vLLM keeps one to itself
    assert found.kv_tokens == found.cache.blocks * 16


def test_splitting_leaves_more_than_twice_the_cache() -> None:
    one, two = (fit(LLAMA, settings(reserve_bytes=GIB), split) for split in (1, 2))
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2)
    assert two.kv_tokens > 2 * one.kv_tokens


def test_the_checkpoint_decides_over_the_count() -> None:
    assert fit(LLAMA, settings(weight_bytes=7), 1).weight_bytes == 7
    assert fit(LLAMA, settings(quantization=chosen("fp8", None)), 1).weight_bytes < LLAMA.parameters.total * 1.2


def test_weights_that_do_not_fit_leave_nothing() -> None:
    found = fit(read_shape(LLAMA_70B), settings(), 1)
    assert found.kv_bytes < 0
    assert not found.starts
    assert (found.cache.blocks, found.kv_tokens) == (0, 0)


def test_an_engine_starts_only_with_room_for_one_longest_sequence() -> None:
    small = settings(24, max_length_tokens=131072)
    assert fit(LLAMA, small, 1).kv_bytes > 0
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


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (LLAMA_8B, 128 * 1024),
        (LLAMA_70B, 320 * 1024),
        (QWEN25_7B, 56 * 1024),
        (MISTRAL_7B, 128 * 1024),
        (DEEPSEEK_V3, 576 * 61 * 2),
        (GEMMA3_27B, 496 * 1024),
        (MINILM, 0),
    ],
)
def test_bytes_of_a_token_are_those_that_are_published(config: Config, size: int) -> None:
    assert bytes_per_sequence(read_shape(config), 1, 2) == size
    assert bytes_per_sequence(read_shape(config), 1, 1) == size // 2


@pytest.mark.parametrize(
    ("config", "groups", "layers"),
    [  # as vLLM's own grouping makes them of so many layers
        (LLAMA_8B, [None], 32),
        (GEMMA3_27B, [None] + [1024] * 6, 10),
        (GEMMA3_4B, [None] + [1024] * 6, 5),
        (GEMMA2_9B, [None, 4096], 21),
        (GPT_OSS_20B, [None, 128], 12),
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(config: Config, groups: list[int | None], layers: int) -> None:
    shape = read_shape(config)
    found = kv_cache(shape, 1, 2, 16, 0)
    assert list(found.groups) == groups
    assert shape.stored is not None
    assert found.block_bytes == 16 * layers * shape.stored.bytes_on_gpu(1, 2)


def test_layers_of_nearly_the_same_number_make_two_groups_of_the_larger() -> None:
    kinds = ["sliding_attention"] * 13 + ["full_attention"] * 12
    shape = read_shape(GPT_OSS_20B | {"num_hidden_layers": 25, "layer_types": kinds})
    found = kv_cache(shape, 1, 2, 16, 0)
    assert list(found.groups) == [None, 128]
    assert shape.stored is not None
    assert found.block_bytes == 16 * 13 * shape.stored.bytes_on_gpu(1, 2)


def test_splitting_shares_kv_heads_until_each_gpu_has_one() -> None:
    sizes = [kv_cache(read_shape(QWEN25_7B), split, 2, 16, 0).block_bytes for split in (1, 2, 4)]
    assert sizes == [56 * 1024 * 16, 28 * 1024 * 16, 14 * 1024 * 16]
    latent = read_shape(DEEPSEEK_V3)
    assert kv_cache(latent, 8, 2, 64, 0).block_bytes == kv_cache(latent, 1, 2, 64, 0).block_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (1280, 80), (1281, 81)])
def test_a_sequence_takes_whole_blocks(tokens: int, blocks: int) -> None:
    assert WHOLE.blocks_for(tokens) == blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(64, 4 + 4), (80, 5 + 4), (90, 6 + 5), (1600, 100 + 4)])
def test_behind_a_window_blocks_are_given_back(tokens: int, blocks: int) -> None:
    assert WINDOW.blocks_for(tokens) == blocks


def test_a_window_is_held_with_what_is_being_read_when_the_engine_starts() -> None:
    assert WINDOW.blocks_to_start(10_000, 100) == 625 + 18  # 63 + 200 tokens, and one block more
    assert WINDOW.blocks_to_start(32, 100) == 2 + 3
    assert WHOLE.blocks_to_start(10_000, 100) == 625


def test_a_shared_prefix_is_counted_once() -> None:
    assert WHOLE.sequences(320) == 50
    assert WHOLE.sequences(320, 160) == (1000 - 10) // 10
    assert WHOLE.sequences(320, 168) == (1000 - 10) // 10  # half a block is not shared
    assert WHOLE.sequences(320, 10_000) == (1000 - 20) // 1  # and each still takes a block of its own


def test_a_shared_prefix_behind_a_window_saves_nothing_there() -> None:
    own = WINDOW.blocks_for(1600, 160)
    assert own == (100 - 10) + 4


def test_less_than_all_blocks_may_be_used() -> None:
    assert WHOLE.sequences(160, share=0.95) == 95
    assert replace(WHOLE, blocks=0).sequences(160) == 0
    assert KvCache(16, 0, (), blocks=1000).sequences(160) == 0


def test_of_a_window_a_sequence_stores_no_more_than_the_window() -> None:
    shape = read_shape(MISTRAL_7B)
    assert bytes_per_sequence(shape, 32768, 2) == bytes_per_sequence(shape, 4096, 2) == 4096 * 128 * 1024
    assert bytes_per_sequence(read_shape(LLAMA_8B), 131072, 2) == 16 * 2**30
    assert bytes_per_sequence(read_shape(MINILM), 512, 2) == 0


def test_kernels_for_latent_vectors_have_larger_blocks() -> None:
    assert default_block_tokens(read_shape(DEEPSEEK_V3)) == 64
    assert default_block_tokens(read_shape(LLAMA_8B)) == 16
