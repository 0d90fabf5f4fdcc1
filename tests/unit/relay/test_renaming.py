"""Answers to clients that use an alias have it as their model, and are otherwise what the backend sent."""

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.relay.renaming import NameReplacer, RenamedEvents
from gateway.core.request import DONE_MARKER, ModelChoice

HOSTILE = ('"model":"org/m"', '\\"model\\":\\"org/m\\"', '{"model":"org/m"}', '"model"', "\\", '"}],"model":"org/m"')
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(HOSTILE)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "a", "usage"]) | TEXTS, inner, max_size=3)
    ),
    max_leaves=12,
)
FIELDS = st.dictionaries(TEXTS.filter(lambda name: name != "model"), VALUES, max_size=4)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": ")])
MARK = b"event: message_stop"


def cut(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(place % (len(whole) + 1) for place in cuts)})
    return [whole[start:end] for start, end in pairwise(edges)]


def fed(replacer: NameReplacer, pieces: list[bytes]) -> bytes:
    return b"".join([*map(replacer.feed, pieces), replacer.rest()])


@given(FIELDS, FIELDS, CUTS, SEPARATORS, st.sampled_from(["org/m", "", 'odd "name"\\', "é"]))
def test_the_name_of_an_answer_is_replaced_and_nothing_else(
    before: dict[str, Any], after: dict[str, Any], cuts: list[int], separators: tuple[str, str], name: str
) -> None:
    document = {**before, "model": name, **{key: value for key, value in after.items() if key not in before}}
    body = json.dumps(document, separators=separators).encode()
    assert orjson.loads(fed(NameReplacer("gpt-4o"), cut(body, cuts))) == document | {"model": "gpt-4o"}


@given(FIELDS, CUTS, st.sampled_from([{}, {"model": None}, {"model": 7}, {"model": ["org/m"]}]))
def test_an_answer_without_a_name_stays_as_it_is(fields: dict[str, Any], cuts: list[int], model: Any) -> None:
    body = orjson.dumps(fields | model)
    assert fed(NameReplacer("gpt-4o"), cut(body, cuts)) == body


@given(st.sampled_from(["x", '"model":"org/m"', "\\", '"']), st.integers(1, 9000), CUTS)
def test_a_long_text_before_the_name_is_passed_on_while_it_comes(text: str, times: int, cuts: list[int]) -> None:
    document = {"content": [{"type": "tool_use", "input": {"model": "org/m"}}, text * times], "model": "org/m"}
    body = orjson.dumps(document)
    replacer = NameReplacer("gpt-4o")
    assert orjson.loads(fed(replacer, cut(body, cuts))) == document | {"model": "gpt-4o"}


def test_no_more_than_a_name_is_kept_back() -> None:
    replacer = NameReplacer("gpt-4o")
    assert len(replacer.feed(b'{"content":"' + b"x" * 100_000)) > 100_000 - 8192
    assert replacer.feed(b"y" * 100_000) == b"y" * 100_000
    assert replacer.feed(b'","model":"org/m","usage":{}}') == b'","model":"gpt-4o","usage":{}}'
    assert replacer.rest() == b""


@given(st.binary(max_size=60), CUTS)
def test_bytes_that_are_no_json_raise_nothing(body: bytes, cuts: list[int]) -> None:
    replacer = NameReplacer("gpt-4o")
    passed = fed(replacer, cut(body, cuts))
    assert replacer.found or passed == body


def chunk(text: str, separators: tuple[str, str] = (",", ":")) -> bytes:
    document = {"id": "c-1", "model": "org/m", "choices": [{"delta": {"content": text}}]}
    return b"data: " + json.dumps(document, separators=separators).encode()


@given(st.lists(TEXTS, max_size=5), CUTS, SEPARATORS, st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_every_event_of_a_completion_has_the_alias(
    texts: list[str], cuts: list[int], separators: tuple[str, str], end: bytes
) -> None:
    stream = RenamedEvents(DONE_MARKER, False, "gpt-4o", nested=False)
    sent = [b": ping", *(chunk(text, separators) for text in texts), DONE_MARKER]
    whole = b"".join(map(stream.take, cut(b"".join(event + end for event in sent), cuts)))
    events = whole.split(end)
    assert events[0] == b": ping"
    assert events[-2:] == [DONE_MARKER, b""]
    came = [orjson.loads(event[6:]) for event in events[1:-2]]
    assert [(each["model"], each["choices"][0]["delta"]["content"]) for each in came] == [("gpt-4o", t) for t in texts]
    assert stream.complete


def test_events_that_lost_their_usage_have_the_alias_too() -> None:
    stream = RenamedEvents(DONE_MARKER, True, "gpt-4o", nested=False)
    spaced = (", ", ": ")
    first = stream.take(chunk("a", spaced) + b"\n\n")
    with_usage = json.dumps({"model": "org/m", "choices": [{"delta": {}}], "usage": {"prompt_tokens": 1}})
    second = stream.take(f"data: {with_usage}\n\n".encode())
    assert b"org/m" not in first + second
    assert b"usage" not in second


RESPONSE = {"id": "resp_1", "metadata": {"model": "org/m"}, "instructions": '"model":"org/m"', "model": "org/m"}


@given(CUTS, TEXTS, st.integers(1, 4000))
def test_named_events_have_the_name_in_their_object(cuts: list[int], text: str, times: int) -> None:
    tools = [{"parameters": {"properties": {"model": "org/m"}}}]
    documents: list[dict[str, Any]] = [
        {"type": "response.created", "response": RESPONSE | {"tools": tools}},
        {"type": "response.output_text.delta", "delta": text},
        {"type": "response.completed", "response": {"output": [{"text": text * times}], **RESPONSE, "tools": tools}},
    ]
    events = [f"event: {each['type']}\ndata: ".encode() + orjson.dumps(each) for each in documents]
    stream = RenamedEvents(None, False, "gpt-4o", nested=True)
    whole = b"".join(map(stream.take, cut(b"".join(event + b"\n\n" for event in events), cuts)))
    came = [orjson.loads(event.partition(b"data: ")[2]) for event in whole.split(b"\n\n")[:-1]]
    for sent in documents:
        if "response" in sent:
            sent["response"] = sent["response"] | {"model": "gpt-4o"}
    assert came == documents


def test_an_event_that_is_too_long_to_be_kept_has_the_alias_too() -> None:
    stream = RenamedEvents(None, False, "gpt-4o", nested=True)
    document = {"response": {"output": '"model":"org/m"' * 30_000, "metadata": {"model": "org/m"}, "model": "org/m"}}
    body = b"data: " + orjson.dumps(document) + b"\n\n"
    pieces = [stream.take(body[start : start + 65536]) for start in range(0, len(body), 65536)]
    assert sum(map(bool, pieces)) > 2
    document["response"]["model"] = "gpt-4o"
    assert orjson.loads(b"".join(pieces)[6:]) == document
    assert b'"model":"gpt-4o"' in stream.take(b'data: {"response":{"model":"org/m"}}\n\n')


@pytest.mark.parametrize(
    ("choice", "lines"),
    [
        (ModelChoice("gpt-4o"), b"x-gateway-model: org/m-2\r\n"),
        (
            ModelChoice("gpt-4o", fell_back_from="é\r\nx: y"),
            b"x-gateway-model: org/m-2\r\nx-gateway-fallback-from: %C3%A9%0D%0Ax: y\r\n",
        ),
    ],
)
def test_headers_name_the_model_and_hold_no_other_header(choice: ModelChoice, lines: bytes) -> None:
    assert choice.headers("org/m-2") == lines
