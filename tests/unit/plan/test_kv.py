import pytest

from gateway.plan.kv import Group, KvLayout, Pool, bytes_per_sequence, bytes_per_token, default_block_tokens, layout
from gateway.plan.model_shape import read_shape
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
    QWEN25_7B,
    Config,
)

WHOLE = KvLayout(16, 1024, (Group(None),))
WINDOW = KvLayout(16, 1024, (Group(None), Group(64)))


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
    assert bytes_per_token(read_shape(config), 2) == size
    assert bytes_per_token(read_shape(config), 1) == size // 2


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
    found = layout(shape, 1, 2, 16)
    assert [group.window_tokens for group in found.groups] == groups
    assert shape.stored is not None
    assert found.block_bytes == 16 * layers * shape.stored.bytes_on_gpu(1, 2)


def test_layers_of_nearly_the_same_number_make_two_groups_of_the_larger() -> None:
    kinds = ["sliding_attention"] * 13 + ["full_attention"] * 12
    shape = read_shape(GPT_OSS_20B | {"num_hidden_layers": 25, "layer_types": kinds})
    found = layout(shape, 1, 2, 16)
    assert [group.window_tokens for group in found.groups] == [None, 128]
    assert shape.stored is not None
    assert found.block_bytes == 16 * 13 * shape.stored.bytes_on_gpu(1, 2)


def test_splitting_shares_kv_heads_until_each_gpu_has_one() -> None:
    sizes = [layout(read_shape(QWEN25_7B), split, 2, 16).block_bytes for split in (1, 2, 4)]
    assert sizes == [56 * 1024 * 16, 28 * 1024 * 16, 14 * 1024 * 16]
    latent = read_shape(DEEPSEEK_V3)
    assert layout(latent, 8, 2, 64).block_bytes == layout(latent, 1, 2, 64).block_bytes


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
    pool = Pool(WHOLE, 1000)
    assert pool.sequences(320) == 50
    assert pool.sequences(320, 160) == (1000 - 10) // 10
    assert pool.sequences(320, 168) == (1000 - 10) // 10  # half a block is not shared
    assert pool.sequences(320, 10_000) == (1000 - 20) // 1  # and each still takes a block of its own


def test_a_shared_prefix_behind_a_window_saves_nothing_there() -> None:
    own = WINDOW.blocks_for(1600, 160)
    assert own == (100 - 10) + 4


def test_less_than_all_blocks_may_be_used() -> None:
    assert Pool(WHOLE, 1000).sequences(160, share=0.95) == 95
    assert Pool(WHOLE, 0).sequences(160) == 0
    assert Pool(KvLayout(16, 0, ()), 1000).sequences(160) == 0


def test_of_a_window_a_sequence_stores_no_more_than_the_window() -> None:
    shape = read_shape(MISTRAL_7B)
    assert bytes_per_sequence(shape, 32768, 2) == bytes_per_sequence(shape, 4096, 2) == 4096 * 128 * 1024
    assert bytes_per_sequence(read_shape(LLAMA_8B), 131072, 2) == 16 * 2**30
    assert bytes_per_sequence(read_shape(MINILM), 512, 2) == 0


def test_kernels_for_latent_vectors_have_larger_blocks() -> None:
    assert default_block_tokens(read_shape(DEEPSEEK_V3)) == 64
    assert default_block_tokens(read_shape(LLAMA_8B)) == 16
