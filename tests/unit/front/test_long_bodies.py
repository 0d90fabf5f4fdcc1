"""Bodies as large as agents and token ids make them: parsed in steps, as a parser does, within the memory budget."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Config, ServerConfig
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import ContextTooComplex, InvalidRequest, MemoryFull
from gateway.core.front import json_body
from gateway.core.front.json_body import JsonLimits, loaded
from gateway.core.request import InferenceRequest
from gateway.core.resources import MemoryBudget
from gateway.core.turns import at_once
from tests.unit.front.readers import request_reader
from tests.unit.front.test_guards import DOCUMENTS, VALUES
from tests.unit.front.wires import Sent

IDS = list(range(100_000, 400_000))
TODO = [{"content": f"Step {at}", "status": "pending", "activeForm": f"Doing step {at}"} for at in range(8)]


def chat(calls: int) -> dict[str, Any]:
    function = {"name": "bash", "arguments": '{"command":"ls -l","timeout":100}'}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for at in range(calls):
        call = {"id": f"call_{at:024}", "type": "function", "function": function}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": call["id"], "content": "x" * 300})
    return {"model": "m", "messages": turns}


def messages(calls: int) -> dict[str, Any]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for at in range(calls):
        use = {"type": "tool_use", "id": f"toolu_{at:024}", "name": "TodoWrite", "input": {"todos": TODO}}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "x" * 100}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"model": "m", "max_tokens": 100, "messages": turns}


def responses(calls: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for at in range(calls):
        named = {"type": "function_call", "call_id": f"call_{at:024}", "name": "bash", "arguments": '{"command":"ls"}'}
        items += [named, {"type": "function_call_output", "call_id": named["call_id"], "output": "x" * 300}]
    return {"model": "m", "input": items}


LONG: dict[str, tuple[bytes, dict[str, Any]]] = {
    "chat": (b"/v1/chat/completions", chat(8000)),
    "messages": (b"/v1/messages", messages(8000)),
    "responses": (b"/v1/responses", responses(8000)),
    "prompt": (b"/v1/completions", {"model": "m", "prompt": IDS}),
    "prompts": (b"/v1/completions", {"model": "m", "prompt": [IDS, IDS]}),
    "small ids": (b"/v1/completions", {"model": "m", "prompt": [1] * 2_000_000}),
    "embeddings": (b"/v1/embeddings", {"model": "m", "input": IDS}),
    "many embeddings": (b"/v1/embeddings", {"model": "m", "input": [IDS[:600]] * 500}),
    "detokenize": (b"/detokenize", {"model": "m", "tokens": IDS}),
}


def read(path: bytes, body: bytes, memory: MemoryBudget) -> InferenceRequest:
    config = Config(backends=(BackendConfig(url="http://10.0.0.1:8000"),), server=ServerConfig())
    reader = request_reader(config, memory=memory)
    incoming = Sent(path, body).incoming()
    assert incoming.route is not None
    return at_once(reader.read_in_steps(incoming, incoming.route, "id", lambda: None))


@pytest.mark.parametrize("name", LONG)
def test_sessions_of_agents_and_token_ids_are_within_the_limits(name: str) -> None:
    path, document = LONG[name]
    body, memory = orjson.dumps(document), MemoryBudget(1 << 30)
    assert len(body) < ServerConfig().max_body_bytes
    assert read(path, body, memory).body == body
    assert memory.used_bytes == 0


def test_what_is_parsed_of_a_long_body_is_within_the_memory_budget() -> None:
    path, document = LONG["chat"]
    body, memory = orjson.dumps(document), MemoryBudget(8_000_000)
    with pytest.raises(MemoryFull):
        read(path, body, memory)
    assert memory.used_bytes == 0


@pytest.mark.parametrize("inside", [[DOCUMENTS], [VALUES]])
def test_a_text_is_the_same_value_in_however_small_pieces(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "_LOAD_BYTES", 8)

    @given(inside[0], st.sampled_from([None, 1]))
    def check(value: Any, indent: int | None) -> None:
        body = json.dumps({"a": value, "ids": [1, -2.5e3, 3] * 9}, indent=indent).encode()
        assert at_once(loaded(body)) == json.loads(body)

    check()


@pytest.mark.parametrize(
    "text",
    [b'{"a":[1,2,3,4,5,6,7,8,,9]}', b'{"a":[1,2,3,4,5,6,7,8,9,]}', b'{"a":["b","c","d"}', b'{"a":{"b":1 2345678}}',
     b'{"a":[01,2,3,4,5,6,7,8]}', b'{"a":[1 2,3,4,5,6,7,8]}', b'{"aaaaaaaaaaaa":1}x', b"[[1,2,3,4,5,6,7,8,9]"],
)  # fmt: skip
def test_what_is_no_json_is_none_in_pieces(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "_LOAD_BYTES", 8)
    with pytest.raises(orjson.JSONDecodeError):
        at_once(loaded(text))


def test_a_long_body_is_parsed_in_many_steps() -> None:
    body = orjson.dumps(LONG["messages"][1])
    assert len(list(loaded(body))) > len(body) // (2 * json_body._LOAD_BYTES)


def test_the_limits_follow_from_the_largest_body_unless_they_are_set() -> None:
    for size in (1000, 8 << 20, 64 << 20):
        limits = JsonLimits(ServerConfig(max_body_bytes=size))
        found = (limits.containers, limits.strings, limits.values)
        assert found == (max(16384, size // 48), max(65536, size // 12), max(262144, size // 16))
    own = JsonLimits(ServerConfig(max_json_containers=1, max_json_strings=2, max_json_values=3))
    assert (own.containers, own.strings, own.values, own.short_bytes) == (1, 2, 3, 1)


@pytest.mark.parametrize(
    "inside", ["[" + "{}," * 200_000 + "1]", "[" + '"",' * 900_000 + "1]", '["",' + "1," * 900_000 + "1]",
               "{" + ",".join(f'"{at}":1' for at in range(400_000)) + "}"],
)  # fmt: skip
def test_more_than_that_is_refused_with_a_code(inside: str) -> None:
    with pytest.raises(ContextTooComplex, match="prompt is too long") as refused:
        read(b"/v1/chat/completions", b'{"model":"m","messages":[],"a":%b}' % inside.encode(), MemoryBudget(1 << 30))
    assert refused.value.code == "context_too_complex"
    assert isinstance(refused.value, InvalidRequest)


PARTS = [{"type": "text", "text": ""}] * 100_000
TURNS = [{"role": "user", "content": "a", "name": "b"}] * 100_000


@pytest.mark.parametrize(
    ("path", "document", "values"),
    [
        (b"/v1/messages", {"model": "m", "messages": [{"role": "user", "content": PARTS}]}, 100_000),
        (b"/v1/responses", {"model": "m", "input": TURNS}, 100_000),
        (b"/v1/chat/completions", {"model": "m", "messages": [1] * 1_000_000}, 1_000_000),
        (b"/v1/chat/completions/batch", {"model": "m", "messages": [[1] * 1000] * 1000}, 1_000_000),
        (b"/v1/completions", {"model": "m", "prompt": ["a"] * 100_000}, 100_000),
    ],
)
def test_what_is_parsed_is_looked_through_in_steps(path: bytes, document: dict[str, Any], values: int) -> None:
    """Before, a prompt was looked for media in one step, and read in another one: up to 140 ms of CPU time each."""
    server = ServerConfig(max_sequences=1 << 20)
    config = Config(backends=(BackendConfig(url="http://10.0.0.1:8000"),), server=server)
    reader = request_reader(config)
    incoming = Sent(path, orjson.dumps(document)).incoming()
    assert incoming.route is not None
    parsing = len([*json_body.parse_body(incoming.body, JsonLimits(server))])
    reading = len([*reader.read_in_steps(incoming, incoming.route, "id", lambda: None)])
    assert reading - parsing >= values // 65536 + values // 16384


def test_a_field_is_replaced_in_steps() -> None:
    pieces = orjson.dumps({"x": [{"a": 1}] * 100_000, "model": "m"}).split(b'"')
    assert len([*json_body.marks_of(pieces)]) >= len(pieces) // 65536
    assert len([*json_body.top_level_keys(pieces)]) >= 300_000 // 131072 + len(pieces) // 65536
    body = orjson.dumps({"x": [{"a": 1}] * 100_000, "model": "m"} | {f"k{n}": 1 for n in range(100_000)})
    steps = [*json_body.with_fields(body, {"model": "m"}, {"model": "n"})]
    assert len(steps) >= 100_000 // 16384 + 300_000 // 131072


def test_an_object_of_too_many_keys_is_refused_wherever_it_is() -> None:
    """It is parsed in one step: 250 ms of CPU time for 350,000 keys."""
    many = {f"k{number}": 1 for number in range(json_body.MOST_KEYS)}
    limits = JsonLimits(ServerConfig())
    assert at_once(json_body.parse_body(orjson.dumps({"x": [many], "y": TODO}), limits))["x"] == [many]
    with pytest.raises(ContextTooComplex, match="131072 keys in one object"):
        at_once(json_body.parse_body(orjson.dumps({"x": [[1, {"a": 1}], {"a": {}} | many], "y": TODO}), limits))
    with pytest.raises(ContextTooComplex, match="131072 keys in one object"):
        at_once(json_body.parse_body(b"}" + orjson.dumps(many | {"a": 1, "b": {}}), limits))


@pytest.mark.parametrize("item", [b"null", b"true", b"1", b'""', b'{"a":1}', b"[[]]"])
def test_long_lists_of_small_values_are_parsed_in_steps(item: bytes) -> None:
    body = b'{"x":[' + b",".join([item] * 400_000) + b"]}"
    assert len([*loaded(body)]) >= 400_000 * len(item) // 1048576
    assert len([*loaded(orjson.dumps({f"k{number}": 1 for number in range(100_000)}))]) > 100_000 // 32768
