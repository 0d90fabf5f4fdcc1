from typing import Any

import pytest

from gateway.features.plan.model import PlanError, Quantization, chosen, count_parameters, read_quantization, text_part
from tests.unit.plan.models import (
    DEEPSEEK_V3,
    GEMMA2_9B,
    GEMMA3_27B,
    GLM_45_AIR,
    GPT2,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_70B,
    MINILM,
    MISTRAL_7B,
    MIXTRAL,
    QWEN3_30B,
    QWEN15_MOE,
    QWEN25_7B,
    Config,
)

# As the modelling code of these families makes them, speculative layers and what sees left out.
COUNTED = [
    (LLAMA_8B, 8_030_261_248),
    (LLAMA_70B, 70_553_706_496),
    (QWEN25_7B, 7_615_616_512),
    (MISTRAL_7B, 7_241_732_096),
    (MIXTRAL, 46_702_792_704),
    (QWEN3_30B, 30_532_122_624),
    (QWEN15_MOE, 14_315_784_192),
    (DEEPSEEK_V3, 671_026_404_352),
    (GEMMA2_9B, 9_241_705_984),
    (GEMMA3_27B, 27_009_346_304),
    (GPT_OSS_20B, 20_914_757_184),
    (GLM_45_AIR, 106_851_586_048),
    (GPT2, 124_439_808),
    (MINILM, 22_713_216),
]


@pytest.mark.parametrize(("config", "parameters"), COUNTED, ids=[str(config["model_type"]) for config, _ in COUNTED])
def test_weights_are_counted_within_a_thousandth(config: Config, parameters: int) -> None:
    assert count_parameters(text_part(config)).total == pytest.approx(
        parameters, rel=1e-3 if parameters > 3e7 else 2e-2
    )


def test_a_token_goes_through_some_experts_only() -> None:
    assert count_parameters(QWEN3_30B).widest == 8 * 768
    assert count_parameters(DEEPSEEK_V3).widest == max(8 * 2048 + 2048, 18432)
    assert count_parameters(LLAMA_8B).widest == 14336


def test_some_layers_of_a_mixture_may_be_dense() -> None:
    every = count_parameters(QWEN3_30B).experts
    assert count_parameters(QWEN3_30B | {"decoder_sparse_step": 2}).experts == every // 2
    assert count_parameters(QWEN3_30B | {"mlp_only_layers": [0, 1, 2]}).experts == every * 45 // 48
    assert count_parameters(QWEN3_30B | {"moe_layer_freq": [0] * 12 + [1] * 36}).experts == every * 36 // 48


def test_other_names_of_experts_and_of_dense_layers_are_known() -> None:
    every = count_parameters(QWEN3_30B)
    ernie = {"num_experts": None, "moe_num_experts": 128, "moe_layer_start_index": 12, "decoder_sparse_step": None}
    assert count_parameters(QWEN3_30B | ernie).experts == every.experts * 36 // 48
    kinds = {"mlp_layer_types": ["dense"] * 24 + ["sparse"] * 24}
    assert count_parameters(QWEN3_30B | kinds).experts == every.experts // 2


def test_experts_by_an_unknown_name_are_not_overlooked() -> None:
    with pytest.raises(PlanError, match=r"n_mlp_experts of config\.json is not known here: give --set num_experts=N"):
        count_parameters(LLAMA_8B | {"n_mlp_experts": 16})
    assert count_parameters(LLAMA_8B | {"num_experts_per_tok": 2}).experts == 0


def test_packing_leaves_embeddings_and_the_output_layer_as_they_are() -> None:
    counted = count_parameters(LLAMA_8B)
    assert counted.bytes(2, None) == 2 * counted.total
    fp8 = counted.bytes(2, read_quantization({"quant_method": "fp8"}))
    assert fp8 == counted.linear + 2 * counted.embeddings
    awq = counted.bytes(2, read_quantization({"quant_method": "awq", "bits": 4, "group_size": 128}))
    assert awq / 2**30 == pytest.approx(5.35, rel=0.03)  # the published AWQ files of this model have 5.73 GB


def test_mxfp4_packs_experts_alone() -> None:
    packed = count_parameters(GPT_OSS_20B).bytes(2, read_quantization({"quant_method": "mxfp4"}))
    assert packed / 2**30 == pytest.approx(12.8, rel=0.01)  # as published for the checkpoint's size


def test_unknown_packing_counts_as_none() -> None:
    counted = count_parameters(LLAMA_8B)
    assert counted.bytes(2, read_quantization({"quant_method": "new"})) == counted.bytes(2, None)


def test_latent_attention_without_its_sizes_says_which() -> None:
    with pytest.raises(PlanError, match="lacks qk_nope_head_dim, v_head_dim"):
        count_parameters(DEEPSEEK_V3 | {"qk_nope_head_dim": None, "v_head_dim": None})


@pytest.mark.parametrize(
    ("section", "bits"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8.0),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.0),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            4 + 16 / 128,
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8.0),
    ],
)
def test_bits_of_a_weight_include_its_scales(section: dict[str, Any], bits: float) -> None:
    found = read_quantization(section)
    assert found is not None
    assert found.bits == bits


def test_unknown_ways_of_packing_are_not_guessed() -> None:
    for section in ({"quant_method": "new"}, {"quant_method": "compressed-tensors"}):
        found = read_quantization(section)
        assert found is not None
        assert found.bits is None


def test_no_section_is_no_packing() -> None:
    assert read_quantization(None) is None


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_may_ask_for_a_packed_kv_cache(section: dict[str, Any]) -> None:
    found = read_quantization(section)
    assert found is not None
    assert found.kv_cache_fp8


def test_the_command_line_wins_over_the_checkpoint() -> None:
    awq = Quantization("awq", 4.2, kv_cache_fp8=True)
    assert chosen("auto", awq) is awq
    assert chosen("none", awq) is None
    assert chosen("fp8", awq) == Quantization("fp8", 8.0, kv_cache_fp8=True)
