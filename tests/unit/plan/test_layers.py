import pytest

from gateway.plan.fields import PlanError, text_part
from gateway.plan.layers import AttentionLayers, attention_layers
from tests.unit.plan.models import (
    GEMMA2_9B,
    GEMMA3_27B,
    GPT_OSS_20B,
    LLAMA_8B,
    MISTRAL_7B,
    MIXTRAL,
    QWEN25_7B,
    Config,
)


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
