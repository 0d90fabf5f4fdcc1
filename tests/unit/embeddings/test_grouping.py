"""Only requests with separable inputs and equal fields may share a batch."""

from typing import Any

import orjson
import pytest

from gateway.features.embeddings.wire import MOST_INPUTS, body_of, inputs_of


def document(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "a"} | fields


@pytest.mark.parametrize(
    ("given", "items", "are_ids"),
    [
        ("a", ["a"], False),
        ("", [""], False),
        (["a", "bc"], ["a", "bc"], False),
        ([1, 2], [[1, 2]], True),
        ([[1, 2], [3]], [[1, 2], [3]], True),
    ],
)
def test_inputs_are_read_in_each_of_their_forms(given: Any, items: list[Any], are_ids: bool) -> None:
    inputs = inputs_of(document(input=given), "m")
    assert inputs is not None
    assert (inputs.items, inputs.are_ids) == (items, are_ids)
    assert len(inputs.sizes_bytes) == len(items)


@pytest.mark.parametrize(
    "given",
    [None, 1, {}, [], [[]], [[1], []], ["a", 1], ["a", [1]], [True], [[True]], [1.5], [-1], [1 << 31], [[1], ["a"]],
     ["a"] * (MOST_INPUTS + 1)],
    ids=str,
)  # fmt: skip
def test_inputs_that_are_none_or_of_no_clear_kind_are_left_to_the_backend(given: Any) -> None:
    assert inputs_of(document(input=given), "m") is None


@pytest.mark.parametrize(
    "fields",
    [{"messages": []}, {"encoding_format": "bytes"}, {"encoding_format": []}, {"embed_dtype": "float16"},
     {"request_id": "x"}, {"stream": False}, {"dimensions": "8"}, {"dimensions": True}, {"dimensions": 8.0},
     {"unheard_of": 1}, {"user": 7}, {"priority": 1.5}, {"padding": True}],
    ids=str,
)  # fmt: skip
def test_a_request_with_anything_that_is_not_understood_is_left_as_it_is(fields: dict[str, Any]) -> None:
    assert inputs_of(document(**fields), "m") is None


def test_requests_with_equal_fields_have_the_same_template() -> None:
    one = inputs_of({"model": "m", "input": "a", "dimensions": 8, "user": "u", "encoding_format": "float"}, "m")
    same = inputs_of({"dimensions": 8, "input": ["b"], "model": "m", "cache_salt": None}, "m")
    assert one is not None
    assert same is not None
    assert one.template == same.template
    assert one.wants_floats
    assert same.wants_floats


@pytest.mark.parametrize(
    "fields", [{"dimensions": 9}, {"truncate_prompt_tokens": 5}, {"cache_salt": "s"}, {"add_special_tokens": False}]
)
def test_requests_with_other_fields_have_another_template(fields: dict[str, Any]) -> None:
    one, other = inputs_of(document(dimensions=8), "m"), inputs_of(document(dimensions=8) | fields, "m")
    assert one is not None
    assert other is not None
    assert one.template != other.template


def test_a_batch_asks_for_base64_of_its_inputs_from_the_model_that_backends_know() -> None:
    inputs = inputs_of(document(model="alias", dimensions=8, user="u", input='"é\u2028\\'), "org/m")
    assert inputs is not None
    assert inputs.sizes_bytes == [7]
    assert orjson.loads(body_of(inputs.template, [*inputs.items, "b"])) == {  # type: ignore[list-item]
        "model": "org/m", "dimensions": 8, "encoding_format": "base64", "input": ['"é\u2028\\', "b"],
    }  # fmt: skip


@pytest.mark.parametrize("given", [[1] * 524_289, [[1] * 300_000] * 2], ids=["one", "two"])
def test_very_many_token_ids_are_sent_on_as_they_are(given: Any) -> None:
    """A look at each of 4,000,000 ids would take 150 ms of CPU time in one step."""
    assert inputs_of(document(input=given), "m") is None
    assert inputs_of(document(input=given[:1]), "m") is not None
