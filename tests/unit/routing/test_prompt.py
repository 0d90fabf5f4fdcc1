from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prompt import Prompt, canonical_prompt, inputs_of, sequences_of

TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=20)})
TURNS = st.lists(TURN, min_size=1, max_size=4)


@given(TURNS, TURNS, st.text(max_size=10))
def test_a_longer_conversation_begins_with_the_pieces_of_a_shorter_one(
    shorter: list[dict[str, str]], more: list[dict[str, str]], system: str
) -> None:
    start = canonical_prompt({"system": system, "messages": shorter})
    whole = canonical_prompt({"system": system, "messages": shorter + more})
    assert whole.pieces[: len(start.pieces)] == start.pieces
    assert len(whole.pieces) == len(start.pieces) + len(more)
    assert whole.text.startswith(start.text)


@given(TURNS)
def test_the_spelling_of_the_json_does_not_matter(turns: list[dict[str, str]]) -> None:
    spaced = orjson.loads(orjson.dumps({"messages": turns}, option=orjson.OPT_INDENT_2))
    assert canonical_prompt(spaced) == canonical_prompt({"messages": turns})


def test_system_text_and_tools_stand_before_the_turns() -> None:
    document = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "f"}], "system": "be brief"}
    text = canonical_prompt(document).text
    assert text.index(b"be brief") < text.index(b'"f"') < text.index(b"hi")


@pytest.mark.parametrize(
    "changed", [{"system": "be long"}, {"tools": [{"name": "g"}]}, {"instructions": "x"}, {"tools": []}]
)
def test_other_system_text_or_tools_make_another_beginning(changed: dict[str, Any]) -> None:
    document = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "f"}], "system": "be brief"}
    one, other = canonical_prompt(document), canonical_prompt(document | changed)
    assert one.pieces[0] != other.pieces[0]
    assert one.pieces[1:] == other.pieces[1:]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"prompt": "abc"}, b"abc"),
        ({"prompt": ["abc", "def"]}, b"abc"),
        ({"input": "abc"}, b"abc"),
        ({"input": [{"role": "user", "content": "a"}]}, b"\x1euser\x1fa"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, b"\x1euser\x1fa"),
        ({"messages": [], "prompt": "abc"}, b""),
    ],
)
def test_of_each_form_of_prompt(document: dict[str, Any], text: bytes) -> None:
    assert canonical_prompt(document) == Prompt([text] if text else [])


@pytest.mark.parametrize(("prompt", "first"), [([1, 2, 3], [1, 2, 3]), ([[1, 2], [3]], [1, 2])])
def test_token_ids_stand_for_themselves_four_bytes_each(prompt: list[Any], first: list[int]) -> None:
    told = canonical_prompt({"prompt": prompt})
    assert told.token_ids == first
    assert told.text == b"".join(number.to_bytes(4, "little") for number in first)


@pytest.mark.parametrize("ids", [[1, -2], [1, 1 << 32], [1, 2.5], [1, "a"], [1, None]])
def test_what_is_no_token_id_is_the_backends_to_refuse(ids: list[Any]) -> None:
    told = canonical_prompt({"prompt": ids})
    assert told.token_ids is None
    assert told.text == orjson.dumps(ids)[1:-1]


def test_the_order_of_a_turns_fields_does_not_matter_but_their_values_do() -> None:
    one = {"role": "user", "content": "hi", "name": "ann"}
    same = {"name": "ann", "content": "hi", "role": "user"}
    assert canonical_prompt({"messages": [one]}) == canonical_prompt({"messages": [same]})
    assert canonical_prompt({"messages": [one]}) != canonical_prompt({"messages": [one | {"name": "bob"}]})


@pytest.mark.parametrize(
    "turn", ["text", None, 5, {}, {"role": 5, "content": "x"}, {"role": "user", "content": None}, {"content": "x"}]
)
def test_turns_that_make_no_sense_are_the_backends_to_refuse(turn: Any) -> None:
    assert canonical_prompt({"messages": [turn, {"role": "user", "content": "x"}]}).text.endswith(b"\x1euser\x1fx")


@pytest.mark.parametrize("document", [{}, {"prompt": None}, {"messages": 5}, {"messages": {"a": 1}}, {"prompt": True}])
def test_a_prompt_that_makes_no_sense_is_the_backends_to_refuse(document: dict[str, Any]) -> None:
    assert len(canonical_prompt(document).text) < 10


@pytest.mark.parametrize(
    ("document", "sequences"),
    [
        ({}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3, 4]}, 1),
        ({"prompt": [[1, 2], [3, 4]], "best_of": 2}, 4),
        ({"messages": [{}, {}], "n": 2}, 2),
        ({"n": 2, "best_of": 5}, 5),
        ({"prompt": []}, 1),
        ({"n": None}, 1),
        ({"n": "7"}, 1),
    ],
)
def test_sequences_are_choices_times_prompts(document: dict[str, Any], sequences: int) -> None:
    assert sequences_of(document) == sequences


@pytest.mark.parametrize(
    ("document", "inputs"),
    [
        ({"input": "a"}, 1),
        ({"input": ["a", "b", "c"]}, 3),
        ({"input": [1, 2, 3]}, 1),
        ({"input": [[1], [2]]}, 2),
        ({"query": "q", "documents": ["a", "b"]}, 2),
        ({"text_1": "q", "text_2": ["a", "b", "c"]}, 3),
        ({"queries": "q", "documents": "d"}, 1),
        ({"data_1": "q", "data_2": ["a", "b"]}, 2),
        ({}, 1),
    ],
)
def test_inputs_are_what_a_pooling_request_computes(document: dict[str, Any], inputs: int) -> None:
    assert inputs_of(document) == inputs


IMAGE, OTHER_IMAGE = ({"type": "image_url", "image_url": {"url": f"data:,{name}"}} for name in "ab")


def test_an_image_stands_in_the_prompt_by_its_digest() -> None:
    def prompt(*parts: Any) -> Prompt:
        return canonical_prompt({"messages": [{"role": "user", "content": list(parts)}]})

    text = {"type": "text", "text": "look"}
    assert prompt(text, IMAGE).media == 1
    assert prompt(text, IMAGE, OTHER_IMAGE).media == 2
    assert prompt(text, IMAGE).text.startswith(prompt(text).text)
    assert prompt(text, IMAGE).text != prompt(text, OTHER_IMAGE).text
    assert len(prompt(text, IMAGE | {"padding": "x" * 10_000}).text) < 100
