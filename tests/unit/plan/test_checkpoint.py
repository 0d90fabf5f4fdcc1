import json
from pathlib import Path
from typing import Any

import pytest

from gateway.features.plan.model import PlanError, needed, number, read_checkpoint, text_part, weigh
from tests.unit.plan.models import DEEPSEEK_V3, GEMMA3_4B, LLAMA_8B


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_tensors(file: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """A safetensors file with names, types and sizes; the values themselves are left out."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    entries: dict[str, Any] = dict(header)
    for name, (dtype, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def weighed(path: Path, value_bytes: int) -> tuple[int | None, str]:
    return weigh(path, read_checkpoint(path)[1], value_bytes)


def test_a_folder_and_its_config_are_read_alike(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B | {"_name_or_path": "meta-llama/Llama-3.1-8B"})
    assert read_checkpoint(tmp_path)[1] == read_checkpoint(tmp_path / "config.json")[1]
    assert read_checkpoint(tmp_path)[0] == str(tmp_path)
    assert read_checkpoint(tmp_path / "config.json")[0] == "meta-llama/Llama-3.1-8B"


def test_without_weights_nothing_is_weighed(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B)
    assert weighed(tmp_path, 2) == (None, "counted from config.json")


def test_an_index_alone_has_the_total(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B)
    index = {"metadata": {"total_size": 16060522496}, "weight_map": {"a": "model-00001-of-00004.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weighed(tmp_path, 2) == (16060522496, "total_size of model.safetensors.index.json")


def test_a_total_of_32_bit_values_is_loaded_smaller(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B | {"torch_dtype": "float32"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 400}}))
    assert weighed(tmp_path, 2)[0] == 200
    index.write_text(json.dumps({"metadata": [], "weight_map": []}))
    assert weighed(tmp_path, 2)[0] is None


def test_headers_are_added_up_and_32_bit_values_loaded_smaller(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B)
    write_tensors(tmp_path / "model.safetensors", {"a": ("BF16", 100), "b": ("F32", 400), "c": ("I32", 40)})
    size, source = weighed(tmp_path, 2)
    assert size == 100 + 200 + 40
    assert source == "the headers of its safetensors files"
    assert weighed(tmp_path, 4)[0] == 540


def test_files_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B)
    write_tensors(tmp_path / "model-1.safetensors", {"a": ("BF16", 100)})
    write_tensors(tmp_path / "model-2.safetensors", {"b": ("BF16", 50)})
    write_tensors(tmp_path / "consolidated.safetensors", {"a": ("BF16", 100), "b": ("BF16", 50)})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weighed(tmp_path, 2)[0] == 150


def test_layers_for_speculation_are_left_out(tmp_path: Path) -> None:
    write_config(tmp_path, DEEPSEEK_V3)
    tensors = {"model.layers.60.w": ("BF16", 10), "model.layers.61.w": ("BF16", 1000)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    assert weighed(tmp_path, 2)[0] == 10


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 16, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_a_broken_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    write_config(tmp_path, LLAMA_8B)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(PlanError, match="not a safetensors file"):
        weighed(tmp_path, 2)


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not there: give a model's folder"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="cannot be read"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="is not a model's config"):
        read_checkpoint(tmp_path)


def test_the_text_part_of_a_model_that_sees_is_found_and_completed() -> None:
    found = text_part(GEMMA3_4B)
    assert (found["num_hidden_layers"], found["hidden_size"]) == (34, 2560)
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (8, 4, 256)
    assert found["torch_dtype"] == "bfloat16"  # of the outer part
    assert found["tie_word_embeddings"] is True


def test_a_part_in_a_part_is_found() -> None:
    inner = {"text_config": {"num_hidden_layers": 7, "model_type": "x"}}
    found = text_part({"thinker_config": inner, "quantization_config": {"quant_method": "awq"}})
    assert found["num_hidden_layers"] == 7
    assert found["quantization_config"] == {"quant_method": "awq"}


def test_null_is_the_same_as_absent() -> None:
    assert number({"head_dim": None, "kv_channels": 128}, "head_dim", "kv_channels") == 128
    assert "head_dim" not in text_part(LLAMA_8B | {"head_dim": None})


@pytest.mark.parametrize("value", [True, "8", 0, -1, None, [8], 8.5, float("inf")])
def test_what_is_no_number_above_zero_is_not_taken(value: object) -> None:
    assert number({"n": value}, "n") is None


def test_all_missing_fields_are_named_with_what_to_give() -> None:
    with pytest.raises(PlanError, match=r"lacks a, c: give --set a=N --set c=N"):
        needed({"b": 1}, ("a",), ("b",), ("c", "d"))
