"""Which event is the first token, on every endpoint and of every engine; and what is held until then."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.relay.first_token import BEGINS_WITH_TEXT, Opening, has_output
from gateway.core.resources import Holding, MemoryBudget


def chat(**delta: object) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]})


def completion(text: str, **more: object) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]})


ECHOED = {"instructions": [{"text": "a"}], "tools": [{"type": "function", "delta": "a"}], "output": [], "usage": None}
ITEM = {"type": "message", "content": [], "role": "assistant"}
STRUCTURE = {
    "vLLM: role": chat(role="assistant", content=""),
    "llama.cpp: role": chat(role="assistant", content=None),
    "SGLang: role": chat(role="assistant", content="", reasoning_content=None, tool_calls=None),
    "empty tool calls": chat(role="assistant", tool_calls=[]),
    "no delta": json.dumps({"choices": [{"index": 0, "finish_reason": None}]}),
    "prompt ids": json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1]}),
    "usage at the start": json.dumps({"choices": [{"delta": {"content": ""}}], "usage": {"prompt_tokens": 9}}),
    "no choice": '{"choices": []}',
    "two roles": json.dumps({"choices": [{"delta": {"role": "assistant"}}, {"delta": {"role": "assistant"}}]}),
    "completion without text": completion(""),
    "transcription without text": json.dumps({"choices": [{"delta": {"content": ""}}]}),
    "response.created": json.dumps({"response": {**ECHOED, "status": "in_progress"}, "type": "response.created"}),
    "response.queued": json.dumps({"response": ECHOED, "type": "response.queued"}),
    "response.in_progress": json.dumps({"type": "response.in_progress", "response": ECHOED}),
    "response.output_item.added": json.dumps({"item": ITEM, "type": "response.output_item.added"}),
    "response.content_part.added": json.dumps({"part": {"text": ""}, "type": "response.content_part.added"}),
    "response.output_text.delta": json.dumps({"delta": "", "type": "response.output_text.delta"}),
    "message_start": json.dumps({"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 9}}}),
    "content_block_start": json.dumps({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}),
    "content_block_delta": json.dumps({"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}),
    "ping": '{"type": "ping"}',
}
OUTPUT = {
    "text": chat(content="a"),
    "role and text": chat(role="assistant", content="a"),
    "a quotation mark": chat(content='"'),
    "white space": chat(content=" "),
    "reasoning": chat(reasoning="a"),
    "reasoning_content": chat(content=None, reasoning_content="a"),
    "refusal": chat(refusal="a"),
    "tool call": chat(tool_calls=[{"index": 0, "id": "call", "function": {"name": "f", "arguments": ""}}]),
    "audio": chat(audio={"data": "AA"}),
    "second choice": json.dumps({"choices": [{"delta": {}}, {"delta": {"content": "a"}}]}),
    "finish": json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]}),
    "half a character": json.dumps({"choices": [{"delta": {"content": ""}, "token_ids": [7]}]}),
    "completion": completion("a"),
    "echo": completion("the prompt a", logprobs={"tokens": ["the"]}),
    "completion's finish": completion("", finish_reason="stop"),
    "response.output_text.delta": json.dumps({"delta": "a", "type": "response.output_text.delta"}),
    "response.reasoning_text.delta": json.dumps({"delta": "a", "type": "response.reasoning_text.delta"}),
    "response.function_call_arguments.delta": json.dumps(
        {"delta": "{", "type": "response.function_call_arguments.delta"}
    ),
    "response.output_item.done": json.dumps({"item": {"type": "function_call"}, "type": "response.output_item.done"}),
    "response.completed": json.dumps({"response": ECHOED, "type": "response.completed"}),
    "response.failed": json.dumps({"response": ECHOED, "type": "response.failed"}),
    "content_block_delta": json.dumps({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}),
    "tool input": json.dumps(
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}
    ),
    "message_delta": json.dumps({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}),
    "message_stop": '{"type": "message_stop"}',
    "transcript.text.delta": json.dumps({"type": "transcript.text.delta", "delta": "a"}),
    "error": '{"error": {"message": "a"}}',
    "done": "[DONE]",
    "unknown": '{"token": {"text": "a"}}',
    "a list": "[1]",
    "no JSON": "hello",
}
ENDS = pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])


def spelled(name: str, data: str, end: bytes) -> list[bytes]:
    """The event as engines print it: with and without spaces, and with its name where it has one."""
    line_end = end[: len(end) // 2]
    compact = data.replace('": ', '":').replace('", ', '",').replace("}, ", "},").replace("], ", "],")
    made = [b"data: " + data.encode(), b"data:" + compact.encode(), b"data: " + compact.encode()]
    if f'"type": "{name}"' in data:
        made += [b"event: " + name.encode() + line_end + each for each in made]
    return [each + end for each in made]


def opening(limit_bytes: int = 1 << 20, budget: MemoryBudget | None = None) -> Opening:
    return Opening(Holding(budget or MemoryBudget(1 << 30)), limit_bytes)


@ENDS
@pytest.mark.parametrize("name", STRUCTURE)
def test_structure_is_held(name: str, end: bytes) -> None:
    for event in spelled(name, STRUCTURE[name], end):
        held = opening()
        assert held.take(event) == b""
        assert not held.has_output
        assert held.take(b"data: [DONE]\n\n") == event + b"data: [DONE]\n\n"


@ENDS
@pytest.mark.parametrize("name", OUTPUT)
def test_the_first_piece_of_output_lets_everything_go(name: str, end: bytes) -> None:
    for event in spelled(name, OUTPUT[name], end):
        budget = MemoryBudget(1 << 20)
        held = opening(budget=budget)
        assert held.take(b": ping\n\nevent: ping\ndata: {}\n\n") == b""
        assert budget.used_bytes == len(b": ping\n\nevent: ping\ndata: {}\n\n")
        assert held.take(event) == b": ping\n\nevent: ping\ndata: {}\n\n" + event
        assert held.has_output
        assert budget.used_bytes == 0


def test_text_that_a_request_brought_along_is_no_output() -> None:
    text = {"choices": [], "metadata": {"text": "a", "content": "b"}, "prompt_text": "c"}
    created = {"metadata": {"choices": [{"text": "a"}]}, "type": "response.created"}
    for document in (text, created):
        event = b"data: " + json.dumps(document).encode() + b"\n\n"
        assert not has_output(event)
    assert not BEGINS_WITH_TEXT.match(b"event: response.created\n" + event)


@ENDS
def test_a_stream_that_begins_with_text_is_seen_at_once(end: bytes) -> None:
    for name in ("text", "role and text", "white space", "completion", "echo"):
        assert all(BEGINS_WITH_TEXT.match(event) for event in spelled(name, OUTPUT[name], end)), name
    for name, data in STRUCTURE.items():
        assert not any(BEGINS_WITH_TEXT.match(event) for event in spelled(name, data, end)), name
    assert not BEGINS_WITH_TEXT.match(b"id: 1" + end[: len(end) // 2] + spelled("text", OUTPUT["text"], end)[0])


@given(st.integers(0, 300_000), st.lists(st.integers(1, 4000), max_size=30), st.booleans())
@example(size=408, sizes=[508], named=True)  # cut within its end
def test_a_long_event_is_judged_by_its_start_and_held_as_a_whole(size: int, sizes: list[int], named: bool) -> None:
    echoed = b'{"type":"response.created","response":{"instructions":"%b","text":"a"}}' % (
        b'\\"text\\":\\"a' * (size // 12)
    )
    created = (b"event: response.created\n" if named else b"event: ping\n") + b"data: " + echoed + b"\n\n"
    delta = b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
    held, at, passed = opening(), 0, b""
    for each in [*sizes, len(created)]:
        passed += held.take(created[at : at + each]) if created[at : at + each] else b""
        at += each
    assert (passed, held.has_output) == (b"", False)
    assert held.take(delta) == created + delta
    assert held.has_output


@pytest.mark.parametrize(("limit_bytes", "budget_bytes"), [(40, 1 << 20), (1 << 20, 40), (0, 1 << 20)])
def test_what_is_too_much_to_hold_is_passed_on_and_the_first_token_is_found_nevertheless(
    limit_bytes: int, budget_bytes: int
) -> None:
    budget = MemoryBudget(budget_bytes)
    held, event = opening(limit_bytes, budget), b"event: ping\ndata: {}\n\n"
    passed = b"".join(held.take(event) for _ in range(3))
    assert passed == event * 3
    assert (held.has_output, budget.used_bytes) == (False, 0)
    assert held.take(event) == event
    assert held.take(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert held.has_output


@pytest.mark.parametrize(
    ("event", "has_ids"),
    [(b"id: 1\ndata: {}\n\n", True), (b"event: a\nid:1\ndata: {}\n\n", True), (b"data: id: 1\n\n", False)],
)
def test_ids_of_events_are_noted(event: bytes, has_ids: bool) -> None:
    held = opening()
    held.take(event)
    assert held.has_ids == has_ids


def test_what_is_dropped_is_no_longer_held() -> None:
    budget = MemoryBudget(1 << 20)
    held = opening(budget=budget)
    held.take(b"event: ping\n\n")
    assert held.drop() == [b"event: ping\n\n"]
    assert budget.used_bytes == 0
