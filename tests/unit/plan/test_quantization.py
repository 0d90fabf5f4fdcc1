from typing import Any

import pytest

from gateway.plan.quantization import Quantization, chosen, read_quantization


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
    assert found.known


def test_unknown_ways_of_packing_are_not_guessed() -> None:
    for section in ({"quant_method": "new"}, {"quant_method": "compressed-tensors"}):
        found = read_quantization(section)
        assert found is not None
        assert not found.known


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
