import math
from contextlib import suppress
from typing import Any

import pytest

from gateway.features.plan.model import AttentionLayers, PlanError, attention_layers, read_shape, text_part
from tests.unit.plan.models import (
    DEEPSEEK_V3,
    GEMMA2_9B,
    GEMMA3_4B,
    GEMMA3_27B,
    GPT2,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_70B,
    MINILM,
    MISTRAL_7B,
    MIXTRAL,
    QWEN3_30B,
    QWEN25_7B,
    Config,
)


def test_a_decoder_stores_keys_and_values_of_its_kv_heads() -> None:
    stored = read_shape(LLAMA_8B).stored
    assert stored is not None
    assert (stored.heads, stored.values_per_head, stored.latent) == (8, 256, False)


def test_latent_attention_stores_one_vector_whole_on_every_gpu() -> None:
    stored = read_shape(DEEPSEEK_V3).stored
    assert stored is not None
    assert (stored.values_per_head, stored.latent) == (576, True)
    assert stored.bytes_on_gpu(1, 2) == stored.bytes_on_gpu(8, 2) == 1152


def test_sparse_attention_keeps_a_key_in_eight_bits_besides() -> None:
    stored = read_shape(DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128}).stored
    assert stored is not None
    assert stored.bytes_on_gpu(1, 2) == 1152 + 132
    assert stored.bytes_on_gpu(8, 1) == 656 + 132  # of the vector, 512 values are packed, with 4 scales, and 64 are not


def test_an_encoder_stores_nothing() -> None:
    shape = read_shape(MINILM)
    assert shape.stored is None
    assert shape.attention == ()
    assert shape.dtype == "float16"


def test_falcon_may_have_one_kv_head_for_all() -> None:
    old = LLAMA_8B | {"model_type": "falcon", "multi_query": True, "num_key_value_heads": None}
    new = old | {"new_decoder_architecture": True, "num_kv_heads": 8}
    heads = [stored.heads for config in (old, new) if (stored := read_shape(config).stored)]
    assert heads == [1, 8]


def test_kv_heads_beyond_their_number_are_held_several_times() -> None:
    stored = read_shape(QWEN25_7B).stored
    assert stored is not None
    assert [stored.bytes_on_gpu(size, 2) / (256 * 2) for size in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (LLAMA_70B, [1, 2, 4, 8, 16, 32, 64]),
        (QWEN25_7B, [1, 2, 4]),  # 28 heads
        (DEEPSEEK_V3, [1, 2, 4, 8, 16, 32, 64]),
        (GPT2, [1, 2, 4]),
        (LLAMA_8B | {"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128}, [1, 2]),  # 6 KV heads by 4
    ],
)
def test_heads_have_to_divide(config: Config, splits: list[int]) -> None:
    shape = read_shape(config)
    assert [size for size in (1, 2, 4, 8, 16, 32, 64) if shape.splits(size)] == splits


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LLAMA_8B, 131072),
        (DEEPSEEK_V3, 163840),  # its file has the length after scaling
        (GEMMA3_27B, 131072),
        (LLAMA_8B | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 262144),
        (LLAMA_8B | {"max_position_embeddings": None}, 2048),
    ],
)
def test_the_greatest_length_is_the_one_that_vllm_takes(config: Config, length: int) -> None:
    assert read_shape(config).max_length_tokens == length


def test_32_bit_checkpoints_are_loaded_with_16() -> None:
    assert read_shape(GEMMA2_9B).dtype == "bfloat16"
    assert read_shape(GEMMA2_9B, "float32").dtype == "float32"
    assert read_shape(LLAMA_8B | {"torch_dtype": None, "dtype": "float16"}).dtype_bytes == 2


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(PlanError, match="--dtype"):
        read_shape(LLAMA_8B | {"torch_dtype": "float8_e4m3fn"})


def test_parts_that_see_are_noticed() -> None:
    assert read_shape(GEMMA3_4B).has_other_parts
    assert not read_shape(LLAMA_8B).has_other_parts


STRANGE: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2.5, math.inf, math.nan, "", "x", [], [0], [None], ["x"], {}, {"type": "linear"},
    {"type": "linear", "factor": math.inf}, {"quant_method": [], "config_groups": [1]},
    {"quant_method": "awq", "bits": "x"},
]  # fmt: skip
NAMES = sorted({
    *LLAMA_8B, *QWEN3_30B, *DEEPSEEK_V3, *GEMMA3_27B, *GPT_OSS_20B, "moe_num_experts", "mlp_layer_types", "multi_query",
    "attention_chunk_size", "no_rope_layers", "use_sliding_window", "is_causal", "dtype", "index_head_dim",
})  # fmt: skip


@pytest.mark.parametrize("base", [LLAMA_8B, QWEN3_30B, DEEPSEEK_V3, GEMMA3_27B, GPT_OSS_20B, MINILM])
def test_whatever_the_file_holds_there_is_a_shape_or_a_reason(base: Config) -> None:
    for name in NAMES:
        for value in STRANGE:
            with suppress(PlanError):
                assert read_shape(base | {name: value}).parameters.total > 0, (name, value)


@pytest.mark.parametrize(
    "more",
    [
        {"hybrid_override_pattern": "M*M-"},
        {"is_encoder_decoder": True},
        {"model_type": "gemma4_text"},
        {"linear_num_value_heads": 32},
        {
            "model_type": "minicpm3",
            "kv_lora_rank": 256,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ],
)
def test_what_the_file_does_not_determine_needs_a_running_engine(more: Config) -> None:
    with pytest.raises(PlanError, match="start vLLM once and plan from its URL"):
        read_shape(LLAMA_8B | more)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA_8B, [(32, None)]),
        (MISTRAL_7B, [(32, 4096)]),
        (MIXTRAL, [(32, None)]),
        (QWEN25_7B, [(28, None)]),  # it has a window that it does not use
        (GEMMA2_9B, [(21, None), (21, 4096)]),
        (GEMMA3_27B, [(10, None), (52, 1024)]),
        (GPT_OSS_20B, [(12, None), (12, 128)]),
    ],
)
def test_layers_have_the_reach_that_the_published_file_says(config: Config, layers: list[tuple[int, int]]) -> None:
    fields = text_part(config)
    found = attention_layers(fields, fields["num_hidden_layers"])
    assert [(kind.count, kind.window_tokens) for kind in found] == layers


def test_local_chunks_of_llama_4_count_as_windows() -> None:
    fields = {"model_type": "llama4_text", "attention_chunk_size": 8192}
    expected = (AttentionLayers(12), AttentionLayers(36, 8192))
    assert attention_layers(fields, 48) == expected
    assert attention_layers(fields | {"no_rope_layers": [1, 1, 1, 0] * 12}, 48) == expected


def test_layers_that_store_something_else_are_refused() -> None:
    with pytest.raises(PlanError, match="linear_attention"):
        attention_layers({"layer_types": ["linear_attention", "full_attention"]}, 2)


@pytest.mark.parametrize(
    ("kind", "field"), [("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")]
)
def test_a_window_without_a_size_is_asked_for(kind: str, field: str) -> None:
    with pytest.raises(PlanError, match=f"--set {field}=N"):
        attention_layers({"layer_types": [kind]}, 1)


def test_sparse_attention_keeps_the_whole_sequence() -> None:
    assert attention_layers({"layer_types": ["indexed_attention"] * 3}, 3) == (AttentionLayers(3),)


def test_layers_that_the_list_leaves_out_see_everything() -> None:
    found = attention_layers({"layer_types": ["sliding_attention"], "sliding_window": 8}, 3)
    assert found == (AttentionLayers(2), AttentionLayers(1, 8))


def test_layers_without_positions_are_not_local_in_other_families() -> None:
    assert attention_layers({"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]}, 4) == (AttentionLayers(4),)
