"""The layout of a body is what a JSON scanner that reads byte by byte finds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.front import json_body
from gateway.core.front.json_body import offset_of, spelled_out
from gateway.core.turns import at_once

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["\\", "\\\\", '"', '\\"', '"\\', "\n", "{", "}]", ":", ",", "\\" * 4096, "\\" * 4097, '"' * 3]
)
VALUES = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
DOCUMENTS = st.dictionaries(TEXT, VALUES, max_size=5)
BODIES = st.builds(
    lambda document, ascii_only, indent: json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode(),
    DOCUMENTS, st.booleans(), st.sampled_from([None, 1, "\t"]),
)  # fmt: skip


def pieces_of(body: bytes) -> list[bytes]:
    return at_once(json_body.pieces_of(body))


def marks_of(pieces: list[bytes]) -> bytes:
    return at_once(json_body.marks_of(pieces))


def top_level_keys(pieces: list[bytes]) -> list[int]:
    return at_once(json_body.top_level_keys(pieces))


def scanned(body: bytes) -> list[bytes]:
    """Alternately outside and inside of strings, byte by byte; escaped quotation marks and backslashes are an n."""
    pieces = [b""]
    escaped = False
    for number in body:
        byte = bytes((number,))
        inside = len(pieces) % 2 == 0
        if byte == b'"' and not escaped:
            pieces.append(b"")
            continue
        pieces[-1] += b"n" if escaped and byte in b'"\\' else byte
        escaped = inside and byte == b"\\" and not escaped
    return pieces


@given(BODIES)
def test_pieces_are_outside_and_inside_of_strings_by_turns(body: bytes) -> None:
    pieces = pieces_of(body)
    assert pieces == scanned(body)
    for place, piece in enumerate(pieces):
        start = offset_of(pieces, place)
        assert plain(body[start : start + len(piece)]) == piece


def plain(body: bytes) -> bytes:
    return body.replace(b"\\\\", b"\\n").replace(b'\\"', b"\\n")


@given(BODIES, st.integers(1, 9))
def test_without_escapes_each_mark_begins_or_ends_a_string_whatever_a_step_ends_in(
    body: bytes, step_bytes: int
) -> None:
    without = at_once(json_body.without_escapes(body, step_bytes))
    assert len(without) == len(body)
    assert without.split(b'"') == scanned(body)
    assert without.count(b"\\") == body.count(b"\\") - body.count(b"\\\\")


@pytest.mark.parametrize("text", ['"' * 200_000, '\\"' * 200_000, 'a"\n' * 70_000 + "\\"])
def test_a_text_of_many_quotation_marks_is_one_piece(text: str) -> None:
    pieces = pieces_of(json.dumps({"a": text, "b": [1]}).encode())
    assert [len(piece) for piece in pieces] == [1, 1, 2, len(json.dumps(text)) - 2, 2, 1, 6]
    assert [pieces[place] for place in top_level_keys(pieces)] == [b"a", b"b"]


@given(BODIES)
def test_marks_have_a_quotation_mark_for_each_string_and_nothing_of_what_is_in_it(body: bytes) -> None:
    pieces = pieces_of(body)
    kept = [bytes(byte for byte in piece if byte in b"{}[],:") for piece in pieces[::2]]
    assert marks_of(pieces) == b'"'.join(kept)


@given(BODIES)
def test_keys_of_the_top_level_are_found_in_order(body: bytes) -> None:
    pieces = pieces_of(body)
    keys = [spelled_out(pieces[place]).decode() for place in top_level_keys(pieces)]
    assert keys == [key.replace('"', "\n").replace("\\", "\n") for key in json.loads(body)]


@given(st.binary(max_size=20) | st.text('"\\{}[],: a', max_size=20).map(str.encode))
def test_what_is_not_json_is_taken_apart_too(body: bytes) -> None:
    pieces = pieces_of(body)
    assert pieces
    top_level_keys(pieces)


@pytest.mark.parametrize(
    ("string", "text"), [(b"model", "model"), (b"mod\\u0065l", "model"), (b"\\u00e9\xc3\xa9", "éé"), (b"a\\/b", "a/b")]
)
def test_a_string_in_any_spelling_is_the_same_text(string: bytes, text: str) -> None:
    assert spelled_out(string) == text.encode()


def test_a_body_without_strings_has_one_piece() -> None:
    body: Any = b"[1,{}]"
    assert (pieces_of(body), marks_of(pieces_of(body))) == ([body], b"[,{}]")
