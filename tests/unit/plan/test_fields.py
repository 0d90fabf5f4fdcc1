import pytest

from gateway.plan.fields import PlanError, needed, number, text_part
from tests.unit.plan.models import GEMMA3_4B, LLAMA_8B


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
    assert number({"head_dim": None, "kv_channels": 128}, ("head_dim", "kv_channels")) == 128
    assert "head_dim" not in text_part(LLAMA_8B | {"head_dim": None})


@pytest.mark.parametrize("value", [True, "8", 0, -1, None, [8], 8.5, float("inf")])
def test_what_is_no_number_above_zero_is_not_taken(value: object) -> None:
    assert number({"n": value}, ("n",)) is None


def test_all_missing_fields_are_named_with_what_to_give() -> None:
    with pytest.raises(PlanError, match=r"lacks a, c: give --set a=N --set c=N"):
        needed({"b": 1}, ("a",), ("b",), ("c", "d"))
