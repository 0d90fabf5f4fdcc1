from typing import Any

import pytest

from gateway.features.exact.conversation import DECISIVE, NotUnderstood, PromptFeature, Reading, decisive, read

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def chat(*messages: dict[str, Any], content_format: str = "string", **more: Any) -> Reading:
    return read("chat", {"messages": list(messages), **more}, content_format)


def content(turn: dict[str, Any], content_format: str) -> Any:
    return chat(turn, content_format=content_format).messages[0]["content"]


def test_a_completion_is_its_text_with_special_tokens() -> None:
    expected = Reading(frozenset((PromptFeature.COMPLETION,)), True, text="Hi")
    assert read("completions", {"prompt": "Hi"}, "string") == expected
    assert read("completions", {"prompt": ["Hi"]}, "string") == expected
    assert not read("completions", {"prompt": "Hi", "add_special_tokens": False}, "string").add_special_tokens


def test_a_conversation_asks_for_an_answer_and_adds_no_special_tokens() -> None:
    reading = chat(USER)
    assert reading.messages == [USER]
    assert reading.variables == {"add_generation_prompt": True, "continue_final_message": False}
    assert (reading.features, reading.tools, reading.add_special_tokens) == ({PromptFeature.CHAT}, None, False)


@pytest.mark.parametrize(
    ("turn", "as_text", "as_parts"),
    [
        (USER, "Hi", [{"type": "text", "text": "Hi"}]),
        ({"role": "user", "content": ""}, "", [{"type": "text", "text": ""}]),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "", "b")]},
            "a\nb",
            [{"type": "text", "text": t} for t in ("a", "", "b")],
        ),
        ({"role": "assistant", "content": None}, "", []),
        ({"role": "tool", "content": [{"type": "text", "text": t} for t in ("a", "b")]}, "a\nb", "a\nb"),
    ],
)
def test_content_is_text_or_parts_as_the_template_wants_it(
    turn: dict[str, Any], as_text: str, as_parts: list[dict[str, str]] | str
) -> None:
    assert content(turn, "string") == as_text
    assert content(turn, "openai") == as_parts


def test_a_tool_calls_arguments_are_an_object_for_the_template() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
    reading = chat(USER, turn, {"role": "tool", "content": "x", "tool_call_id": "c1"})
    assert reading.messages[1]["tool_calls"] == [
        {"id": "c1", "function": {"arguments": {"b": 1, "a": [2]}, "name": "f"}, "type": "function"}
    ]
    assert list(reading.messages[1]["tool_calls"][0]) == ["id", "function", "type"], "templates print it as it is"
    assert reading.messages[2] == {"role": "tool", "content": "x", "tool_call_id": "c1"}
    assert PromptFeature.TOOLS in reading.features
    assert turn["tool_calls"] == [CALL], "the request stays as it is"


@pytest.mark.parametrize("arguments", ["", "[1]", "nonsense", "null"])
def test_arguments_that_are_no_object_count_as_none(arguments: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    made = chat({"role": "assistant", "content": "", "tool_calls": [call]}).messages[0]["tool_calls"]
    assert made[0]["function"]["arguments"] == {}


def test_no_tool_calls_are_left_out() -> None:
    for none in (None, []):
        assert chat({"role": "assistant", "content": "x", "tool_calls": none}).messages == [
            {"role": "assistant", "content": "x"}
        ]


def test_tools_are_rendered_in_one_order_with_missing_fields_as_null() -> None:
    tools = [TOOL, {"type": "function", "function": {"strict": True, "name": "g"}}]
    rendered = chat(USER, tools=tools).tools
    assert rendered is not None
    assert list(rendered[1]["function"].items()) == [
        ("name", "g"), ("description", None), ("parameters", None), ("strict", True),
    ]  # fmt: skip
    assert rendered[0] == TOOL


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_both_its_names(name: str) -> None:
    reading = chat({"role": "assistant", "content": "x", name: "why"})
    assert reading.messages[0] == {
        "role": "assistant", "content": "x", "reasoning": "why", "reasoning_content": "why",
    }  # fmt: skip
    assert PromptFeature.REASONING in reading.features


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"chat_template_kwargs": {"a": 1, "b": None, "c": "auto"}}, {"a": 1}),
        ({"documents": [{"text": "x"}]}, {"documents": [{"text": "x"}]}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"reasoning_effort": None, "documents": None, "chat_template_kwargs": None}, {}),
    ],
)
def test_variables_reach_the_template_as_vllm_gives_them(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    flags = {"add_generation_prompt": True, "continue_final_message": False}
    assert chat(USER, **fields).variables == variables | flags


def test_each_way_of_making_a_prompt_is_a_feature_of_its_own() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}] * 2}
    assert chat(parts).features == {PromptFeature.CHAT, PromptFeature.PARTS}
    assert chat(USER, tools=[TOOL]).features == {PromptFeature.CHAT, PromptFeature.TOOLS}
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(USER, **flags).features == {PromptFeature.CHAT, PromptFeature.CONTINUED}


@pytest.mark.parametrize(
    "turn",
    [
        "text",
        {"role": "developer", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": "x", "reasoning": "y"},
        {"role": "user", "content": "x", "name": None},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "uuid": "1"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."},
        {"role": "assistant", "content": "x", "refusal": "no"},
        {"role": "assistant", "content": "x", "reasoning": 5},
        {"role": "assistant", "content": "x", "tool_calls": {"a": 1}},
        {"role": "assistant", "content": "x", "tool_calls": [CALL | {"index": 0}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL | {"type": "custom"}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL | {"id": 1}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL | {"function": {"name": "f"}}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "x", "tool_call_id": None},
    ],
)
def test_a_turn_that_may_be_read_otherwise_is_not_read(turn: Any) -> None:
    with pytest.raises(NotUnderstood):
        chat(turn)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "x"},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": [1]},
        {"truncate_prompt_tokens": 5},
        {"mm_processor_kwargs": {"a": 1}},
        {"media_io_kwargs": {"a": 1}},
        {"prompt_embeds": "x"},
        {"add_generation_prompt": "yes"},
        {"continue_final_message": None},
        {"tools": []},
        {"tools": {"a": 1}},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL | {"type": "web_search"}]},
        {"tools": [TOOL | {"defer_loading": True}]},
        {"tools": [{"type": "function", "function": {"name": "f", "other": 1}}]},
        {"tools": [{"type": "function", "function": {}}]},
    ],
)
def test_a_request_that_may_be_read_otherwise_is_not_read(fields: dict[str, Any]) -> None:
    with pytest.raises(NotUnderstood):
        read("chat", {"messages": [USER]} | fields, "string")


@pytest.mark.parametrize("document", [{}, {"prompt": 5}, {"prompt": ["a", "b"]}, {"prompt": "a", "suffix": "b"}])
def test_a_completion_that_is_not_one_text_is_not_read(document: dict[str, Any]) -> None:
    with pytest.raises(NotUnderstood):
        read("completions", document, "string")


@pytest.mark.parametrize("endpoint", ["responses", "messages", "embeddings"])
def test_other_endpoints_are_not_read(endpoint: str) -> None:
    with pytest.raises(NotUnderstood):
        read(endpoint, {"messages": [USER], "prompt": "x"}, "string")


def test_only_what_decides_the_prompt_is_handed_on() -> None:
    document = {"messages": [USER], "temperature": 1, "stream": True, "tools": None}
    assert decisive(document) == {"messages": [USER], "tools": None}
    assert len(set(DECISIVE)) == len(DECISIVE)
