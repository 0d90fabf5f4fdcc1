"""The guard accepts what a JSON parser accepts, except what could do harm or mislead; limits are exact."""

import json
import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway._native import json_object
from gateway.config import ServerConfig
from gateway.core.errors import InvalidRequest
from gateway.core.front import json_body
from gateway.core.front.json_body import ACTED_ON, REFUSED, JsonLimits
from gateway.core.turns import at_once

LIMITS = ServerConfig()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
AWKWARD = st.sampled_from(
    ['"', "\\", '\\"', "{", "}]", '","model":"', "\u2028", "\x00", "a\\", "é", "😀", "model", "n"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT | AWKWARD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | AWKWARD, inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
KEYS = (TEXT | AWKWARD | st.sampled_from(sorted(ACTED_ON))).filter(lambda key: key not in REFUSED)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=5)


def parse_body(body: bytes, server: ServerConfig) -> dict[str, Any]:
    limits = JsonLimits(server)
    document = at_once(json_body.parse_body(body, limits))
    if len(body) <= limits.short_bytes:
        assert json_object(body, limits.depth) in (None, document)
    return document


def limits(**changed: int) -> ServerConfig:
    return ServerConfig.model_validate(changed)


def spelled(text: str, escaped: list[bool]) -> str:
    """A JSON string, some of whose letters are written as escapes."""
    letters = [
        f"\\u{ord(letter):04x}" if escape and ord(letter) < 0x10000 else json.dumps(letter, ensure_ascii=False)[1:-1]
        for letter, escape in zip(text, escaped, strict=True)
    ]
    return '"' + "".join(letters) + '"'


@st.composite
def spellings(draw: st.DrawFn, text: str) -> str:
    return spelled(text, draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text))))


@given(DOCUMENTS, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_every_json_object_is_read_as_a_json_parser_reads_it(
    document: dict[str, Any], ascii_only: bool, indent: int | str | None
) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    assert parse_body(body, LIMITS) == json.loads(body)


@given(DOCUMENTS, st.data())
def test_a_body_that_was_damaged_is_refused_exactly_when_it_is_not_a_json_object_any_more(
    document: dict[str, Any], data: st.DataObject
) -> None:
    body = bytearray(json.dumps(document, ensure_ascii=False).encode())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 2))] = data.draw(
        st.sampled_from([b"", b'"', b"\\", b"{", b"]", b",", b"a"])
    )
    try:
        expected: Any = json.loads(
            bytes(body), object_pairs_hook=_unless_a_policy_key_is_there_twice, parse_constant=_no_json
        )
    except (ValueError, RecursionError):
        expected = None
    if isinstance(expected, dict) and REFUSED.keys().isdisjoint(expected):
        assert parse_body(bytes(body), LIMITS) == expected
    else:
        with pytest.raises(InvalidRequest):
            parse_body(bytes(body), LIMITS)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is known to Python only")


def _unless_a_policy_key_is_there_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)  # one damaged byte never makes a second policy key out of one


@given(DOCUMENTS, st.sampled_from(sorted(ACTED_ON)), st.data())
def test_a_policy_key_is_never_there_twice_in_whatever_spelling(
    document: dict[str, Any], key: str, data: st.DataObject
) -> None:
    members = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items() if name != key]
    for _ in range(2):
        twin = f"{data.draw(spellings(key))}:{json.dumps(data.draw(VALUES))}"
        members.insert(data.draw(st.integers(0, len(members))), twin)
    with pytest.raises(InvalidRequest, match="Duplicate key") as refused:
        parse_body(("{" + ",".join(members) + "}").encode(), LIMITS)
    assert refused.value.param == key


@given(st.sampled_from(sorted(ACTED_ON)), st.data())
def test_the_same_name_in_a_nested_object_or_as_a_value_is_no_second_key(key: str, data: st.DataObject) -> None:
    name = data.draw(spellings(key))
    body = f'{{{name}: [{name}, {{{name}: 1, "x": {{{name}: 2}}}}], "other": {name}}}'
    assert parse_body(body.encode(), LIMITS) == json.loads(body)


def test_a_key_that_we_do_not_act_on_may_be_there_twice() -> None:
    assert parse_body(b'{"model":"m","user":1,"user":2}', LIMITS) == {"model": "m", "user": 2}


@given(st.sampled_from(sorted(REFUSED)), st.data())
def test_fields_that_act_for_another_client_are_refused_in_any_spelling(key: str, data: st.DataObject) -> None:
    with pytest.raises(InvalidRequest, match="Unsupported field") as refused:
        parse_body(f'{{"model": "m", {data.draw(spellings(key))}: 1}}'.encode(), LIMITS)
    assert refused.value.param == key


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"null", b"[]", b'"x"', b"1", b"{", b"}", b"{}{}", b'{"a":1,}', b"{'a':1}", b'{"a":NaN}',
     b'{"a":1e999}', b'{"a":"\x01"}', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b"\xef\xbb\xbf{}", b'{"a"', b'{"a":"',
     b'{"a":"\\', b'{"a":"\\"'],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(body, LIMITS)


def nested(shape: str) -> bytes:
    """Brackets one in the other: `[` for arrays, `{` for objects, outermost first."""
    body = b"1"
    for bracket in reversed(shape):
        body = b"[%b]" % body if bracket == "[" else b'{"a":%b}' % body
    return body


@given(st.integers(1, 12), st.text("[{", min_size=0, max_size=16), st.integers(0, 3))
def test_the_limit_of_depth_is_exact_for_every_mix_of_brackets(deepest: int, inside: str, siblings: int) -> None:
    shape = "{" + inside
    body = nested(shape)[:-1] + b',"b":[[],{}]' * siblings + b"}"
    depth = max(len(shape), 3 if siblings else 0)
    if depth <= deepest:
        assert parse_body(body, limits(max_json_depth=deepest)) == json.loads(body)
    else:
        with pytest.raises(InvalidRequest, match=f"limit of {deepest} nesting levels"):
            parse_body(body, limits(max_json_depth=deepest))


def test_brackets_in_strings_are_no_nesting() -> None:
    body = json.dumps({"a": "[[[[{{{{" * 100, "b": '"[[['}).encode()
    assert parse_body(body, limits(max_json_depth=1, max_json_containers=1))["b"] == '"[[['


@pytest.mark.parametrize(("containers", "accepted"), [(4, True), (3, False)])
def test_the_limit_of_containers_is_exact(containers: int, accepted: bool) -> None:
    body = b'{"a":[{},[]]}'
    if accepted:
        assert parse_body(body, limits(max_json_containers=containers))
    else:
        with pytest.raises(InvalidRequest, match="limit of 3 objects and arrays"):
            parse_body(body, limits(max_json_containers=containers))


@pytest.mark.parametrize(("strings", "accepted"), [(3, True), (2, False)])
def test_the_limit_of_strings_is_exact(strings: int, accepted: bool) -> None:
    body = b'{"a":["b","c"]}'
    if accepted:
        assert parse_body(body, limits(max_json_strings=strings))
    else:
        with pytest.raises(InvalidRequest, match="limit of 2 strings"):
            parse_body(body, limits(max_json_strings=strings))


def test_escaped_quotation_marks_are_text_of_which_there_may_be_any_number() -> None:
    text = json.dumps([{"name": "search", "arguments": {"query": "a"}}] * 180_000)
    assert text.count('"') > 2 * JsonLimits(LIMITS).strings
    document = {"model": "m", "messages": [{"role": "user", "content": text}]}
    assert parse_body(json.dumps(document).encode(), LIMITS) == document
    with pytest.raises(InvalidRequest, match="Duplicate key 'model'"):
        parse_body(json.dumps(document)[:-1].encode() + b',"model":"m"}', LIMITS)


@pytest.mark.parametrize(("commas", "accepted"), [(9, True), (8, False)])
def test_the_limit_of_values_counts_commas(commas: int, accepted: bool) -> None:
    body = b'{"a":[0,1,2,3,4,5,6,7,8,"9"]}'
    if accepted:
        assert parse_body(body, limits(max_json_values=commas))
    else:
        with pytest.raises(InvalidRequest, match="limit of 8 values"):
            parse_body(body, limits(max_json_values=commas))


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b'{"a":{}},' * 1_000_000 + b"1]}",
        b"[" * 2_000_000,
        b'{"a":["' + b'\\"' * 1_000_000 + b'"' + b',""' * 700_000 + b"]}",
        b'{"a":"' + b"\\" * 2_000_000,
        b'{"model":1,' + b'"model":1,' * 60_000 + b'"b":1}',
        b'{"a":["",' + b"0," * 2_000_000 + b"0]}",
    ],
    ids=[
        "small objects",
        "only brackets",
        "many strings behind escaped quotes",
        "backslashes",
        "duplicates",
        "numbers",
    ],
)
@pytest.mark.timeout(5)
def test_no_body_takes_long_to_refuse(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(body, LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b"[" * 65 + b"]" * (8 << 20) + b"}",
        b'{"a":[' + b"[]," * 2000 + b"[" * 100 + b"}" * (8 << 20),
    ],
)
def test_brackets_that_only_close_cost_one_look(body: bytes) -> None:
    """Before, each level looked through all of them: 0.9 s of CPU time for these 8 MiB."""
    before = time.thread_time()
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_body(body, LIMITS)
    assert time.thread_time() - before < 0.15


@pytest.mark.parametrize("text", [b"\\\\", b"\\u006d", b'\\"' * 8, b"words", "\U0001f600".encode()])
@pytest.mark.parametrize("other", [b'"x":"model"', b'"x":{"model":1}', b'"m\\u006fre":1'])
def test_no_text_makes_the_search_for_a_key_slow(text: bytes, other: bytes) -> None:
    """A body that has a policy key's name twice, or an escaped key, is not parsed a second time."""
    count = min((4 << 20) // len(text), 65536 // 8)
    filler = text * count + b" " * ((4 << 20) - len(text) * count)
    body = b'{"model":"m",' + other + b',"y":"' + filler + b'"}'
    before = time.thread_time()
    orjson.loads(body)
    parsed = time.thread_time()
    parse_body(body, LIMITS)
    assert time.thread_time() - parsed < 0.1 + 10 * (parsed - before)
