from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway._native import prefix_keys
from gateway.core.routing.prompt_blocks import (
    LONGEST_BYTES,
    Prompt,
    canonical_prompt,
    inputs_of,
    seed,
    sequences_of,
)

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
        ({"input": "abc"}, b"abc"),
        ({"input": [{"role": "user", "content": "a"}]}, b"\x1euser\x1fa"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, b"\x1euser\x1fa"),
        ({"messages": [], "prompt": "abc"}, b""),
    ],
)
def test_of_each_form_of_prompt(document: dict[str, Any], text: bytes) -> None:
    assert canonical_prompt(document) == Prompt([text] if text else [])


def test_of_several_prompts_the_first_speaks_and_the_others_have_a_size() -> None:
    assert canonical_prompt({"prompt": ["abc", "defg", "h"]}) == Prompt([b"abc"], more_bytes=5)
    assert canonical_prompt({"prompt": [[1, 2], [3]]}).more_bytes == 4


@pytest.mark.parametrize(("prompt", "first"), [([1, 2, 3], [1, 2, 3]), ([[1, 2], [3]], [1, 2])])
def test_token_ids_stand_for_themselves_four_bytes_each(prompt: list[Any], first: list[int]) -> None:
    found = canonical_prompt({"prompt": prompt})
    assert found.token_ids == first
    assert found.text == b"".join(number.to_bytes(4, "little") for number in first)


@pytest.mark.parametrize("ids", [[1, -2], [1, 1 << 32], [1, 2.5], [1, "a"], [1, None]])
def test_what_is_no_token_id_is_the_backends_to_refuse(ids: list[Any]) -> None:
    found = canonical_prompt({"prompt": ids})
    assert found.token_ids is None
    assert found.text == orjson.dumps(ids)[1:-1]


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
        ({"queries": "q", "items": ["a", "b"]}, 2),
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


# What makes other tokens makes other keys, and nothing else does.

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BASE: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, PICTURE]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a cat", "tool_call_id": "1"},
        {"role": "user", "content": "And this?", "name": "ann"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}


def keys_of(document: dict[str, Any]) -> tuple[int, ...]:
    return prefix_keys(canonical_prompt(document).pieces, seed("m"))[0]


def with_turn(place: int, **changed: Any) -> dict[str, Any]:
    turns = list(BASE["messages"])
    turns[place] = turns[place] | changed
    return BASE | {"messages": turns}


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "Be long."},
        {"instructions": "Be long."},
        {"tools": [*BASE["tools"], *BASE["tools"]]},
        {"tools": None},
        {"tool_choice": "none"},
        {"documents": [{"title": "t", "text": "x"}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"reasoning": {"effort": "high"}},
        {"add_special_tokens": False},
        {"add_special_tokens": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"truncate_prompt_tokens": 100},
        {"mm_processor_kwargs": {"size": 5}},
        {"media_io_kwargs": {"video": {"num_frames": 5}}},
        {"previous_response_id": "resp_1"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_field_that_changes_the_prompts_tokens_changes_all_keys(fields: dict[str, Any]) -> None:
    assert not set(keys_of(BASE)) & set(keys_of(BASE | fields))


@pytest.mark.parametrize(
    ("place", "changed"),
    [
        (0, {"content": "You are long."}),
        (0, {"role": "developer"}),
        (1, {"content": [{"type": "text", "text": "What is that?"}, PICTURE]}),
        (1, {"content": [PICTURE, {"type": "text", "text": "What is this?"}]}),
        (1, {"content": [{"type": "text", "text": "What is this?"}, PICTURE | {"uuid": "x"}]}),
        (1, {"content": [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]}),
        (1, {"content": [{"type": "text", "text": "What is this?"}]}),
        (1, {"content": "What is this?"}),
        (2, {"tool_calls": [CALL | {"function": {"name": "g", "arguments": '{"a": 1}'}}]}),
        (2, {"tool_calls": [CALL | {"function": {"name": "f", "arguments": '{"a": 2}'}}]}),
        (2, {"tool_calls": None}),
        (2, {"reasoning_content": "hm"}),
        (3, {"tool_call_id": "2"}),
        (3, {"content": "a dog"}),
        (4, {"name": "bob"}),
    ],
)
def test_a_turn_that_differs_changes_the_keys_from_there_on(place: int, changed: dict[str, Any]) -> None:
    one, other = canonical_prompt(BASE), canonical_prompt(with_turn(place, **changed))
    before = len(prefix_keys(one.pieces[: 1 + place], seed("m"))[0])
    ones, others = keys_of(BASE), keys_of(with_turn(place, **changed))
    assert one.pieces[1 + place] != other.pieces[1 + place]
    assert ones[:before] == others[:before]
    assert not set(ones[before:]) & set(others[before:])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"top_p": 0.1, "top_k": 5, "min_p": 0.1},
        {"max_tokens": 5, "max_completion_tokens": 6},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"user": "ann"},
        {"seed": 5},
        {"n": 3},
        {"stop": ["x"]},
        {"tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"prompt_cache_key": "x"},
        {"priority": 1},
        {"metadata": {"a": "b"}},
        {"system": "", "documents": [], "chat_template_kwargs": {}, "reasoning_effort": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_other_field_changes_the_keys(fields: dict[str, Any]) -> None:
    assert keys_of(BASE | fields) == keys_of(BASE)


def test_the_order_of_fields_and_the_spelling_of_strings_do_not_matter() -> None:
    turns = [dict(reversed(turn.items())) for turn in BASE["messages"]]
    other = orjson.loads(
        orjson.dumps({"tools": BASE["tools"], "messages": turns, "model": "m"}, option=orjson.OPT_INDENT_2).replace(
            b"brief", b"\\u0062rief"
        )
    )
    assert keys_of(other) == keys_of(BASE)


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_where_a_text_is_split_into_parts_matters(texts: list[str]) -> None:
    def document(parts: list[str]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]}

    split, joined = keys_of(document(texts)), keys_of(document(["".join(texts)]))
    assert (split == joined) == (len(texts) == 1)


@given(st.lists(TURN, max_size=6))
def test_the_answer_is_the_last_turn_of_the_assistant(turns: list[dict[str, str]]) -> None:
    answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    last = answers[-1] if answers else -1
    assert canonical_prompt({"messages": turns}).answer == last
    opened = canonical_prompt({"messages": turns, "system": "x"})
    assert opened.answer == (last + 1 if answers else -1)
    if answers:
        assert opened.pieces[opened.answer] == f"\x1eassistant\x1f{turns[last]['content']}".encode()


def test_a_long_prompt_has_few_keys() -> None:
    lines = [f"line {number} of the text\n" for number in range(12_000)]
    text = "".join(lines)[:200_000]
    assert len(keys_of({"prompt": text})) < 110
    turns = [{"role": "user", "content": text[at : at + 4000]} for at in range(0, 200_000, 4000)]
    assert len(keys_of({"messages": turns})) < 200


@given(st.lists(st.integers(0, 1 << 17), min_size=1, max_size=500), st.integers(0, 500))
def test_prompts_of_token_ids_share_the_keys_of_what_they_have_in_common(ids: list[int], at: int) -> None:
    other = [*ids[:at], 1 << 18, *ids[at:]]
    ones, others = keys_of({"prompt": ids}), keys_of({"prompt": other})
    shared = 4 * min(at, len(ids)) // 256
    assert ones[:shared] == others[:shared]
    assert not set(ones[shared:]) & set(others[shared:])


# What is beyond the last block is not looked at, but has a size.


def test_text_beyond_the_last_block_is_counted_not_kept() -> None:
    long = "x" * (LONGEST_BYTES + 1000)
    for document in (
        {"prompt": long},
        {"messages": [{"role": "user", "content": long}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]},
        {"messages": [{"role": "user", "content": long, "name": "ann"}]},
        {"prompt": [long, "abc"]},
    ):
        prompt = canonical_prompt(document)
        assert LONGEST_BYTES <= len(prompt.text) < LONGEST_BYTES + 100
        assert len(long) <= len(prompt.text) + prompt.more_bytes < len(long) + 100


def test_token_ids_beyond_the_last_block_count_and_are_not_kept() -> None:
    ids = [7] * (LONGEST_BYTES // 4)
    prompt = canonical_prompt({"prompt": [*ids, 8, 9]})
    assert (prompt.token_ids, len(prompt.text), prompt.more_bytes) == (ids, LONGEST_BYTES, 8)


def test_of_very_many_turns_and_parts_only_the_first_are_read() -> None:
    turns = canonical_prompt({"messages": [{"role": "user", "content": "ab"}] * 10_000})
    assert len(turns.pieces) == LONGEST_BYTES // 512
    assert turns.more_bytes == 2 * (10_000 - len(turns.pieces))
    parts = canonical_prompt({"messages": [{"role": "user", "content": [IMAGE] * 10_000}]})
    assert parts.media == 10_000
    assert len(parts.text) < 4096 * 20


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": LONG},
        {"role": "user", "content": [LONG]},
        {"role": "user", "content": [{"type": "text", "text": LONG}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": LONG}}]},
    ],
)
def test_no_number_of_turns_or_parts_hides_a_long_one(last: dict[str, Any]) -> None:
    short = [{"role": "user", "content": "a"}] * 5000
    prompt = canonical_prompt({"messages": [*short, last]})
    assert 100_000 <= len(prompt.text) + prompt.more_bytes < 200_000
    parts = canonical_prompt({"messages": [{"role": "user", "content": ["a"] * 5000}, last]})
    assert 100_000 <= len(parts.text) + parts.more_bytes < 200_000


@pytest.mark.parametrize(
    "document",
    [
        {"messages": [{"role": [0.5] * 100_000, "content": "x"}]},
        {"messages": [{"role": "user", "content": [0.5] * 100_000}]},
        {"messages": [0.5] * 100_000},
        {"prompt": [0.5] * 100_000},
        {"prompt": [[0.5] * 100_000]},
        {"input": [None] * 100_000},
    ],
)
def test_what_no_engine_takes_for_a_prompt_is_not_spelled_out(document: dict[str, Any]) -> None:
    assert len(canonical_prompt(document).text) < 20_000
