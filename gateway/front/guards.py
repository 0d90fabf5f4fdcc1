"""Checks on a JSON body before it is parsed, so that no body can hurt the event loop or fool a backend.

A byte limit alone is not enough: 16 MiB of `{"a":{}},` takes seconds and 28 times its size to parse. Splitting the body
at its quotation marks, once, gives all that is needed: what stands outside strings has every bracket and comma, and the
strings show whether a key can be there twice.
"""

from typing import Any

import orjson

from gateway.config import ServerConfig
from gateway.errors import InvalidRequest
from gateway.front.fields import ACTED_ON, refuse_fields
from gateway.front.quotes import BACKSLASH, Layout, layout_of, spelled_out, without_escapes
from gateway.front.steps import SHORT_BYTES, Steps

_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_SPELLINGS = frozenset(name.encode() for name in ACTED_ON)
_PIECES_A_STEP = 32768
_LONGEST_BYTES = 6 * max(map(len, ACTED_ON))  # of a key that is spelled with escapes only


def parse_body(body: bytes, limits: ServerConfig) -> Steps[dict[str, Any]]:
    """The body as a JSON object. Raises InvalidRequest that says what is wrong."""
    most, long = limits.max_json_strings, len(body) > SHORT_BYTES
    strings = body
    if len(body) > 2 * most and body.count(b'"') > 2 * most:
        strings = yield from without_escapes(body)
        if strings.count(b'"') > 2 * most:
            raise InvalidRequest(f"The body exceeds the limit of {most} strings (server.max_json_strings).")
    pieces = strings.split(b'"')
    least = min(limits.max_json_depth, limits.max_json_containers)
    has_shape = len(body) > limits.max_json_values or body.count(b"{") + body.count(b"[") > least
    if long:
        yield
    may_repeat = yield from _may_have_a_key_twice(pieces)
    if long:
        yield
    layout = (yield from layout_of(strings)) if has_shape or may_repeat else None
    if has_shape and layout is not None:
        if long:
            yield
        marks = layout.marks()
        if long:
            yield
        _check_shape(marks, limits)
    if long:
        yield
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if type(document) is not dict:
        raise InvalidRequest("The body must be a JSON object.")
    if long:
        yield
    if may_repeat and layout is not None and (duplicate := _duplicate_key(layout)):
        raise InvalidRequest(f"Duplicate key {duplicate!r}.", param=duplicate)
    refuse_fields(document)
    return document


def _check_shape(marks: bytes, limits: ServerConfig) -> None:
    """Bounds on objects, arrays, values and nesting."""
    containers = marks.count(b"{") + marks.count(b"[")
    if containers > limits.max_json_containers:
        raise InvalidRequest(
            f"The body exceeds the limit of {limits.max_json_containers} objects and arrays"
            " (server.max_json_containers)."
        )
    if len(marks) > limits.max_json_values and marks.count(b",") > limits.max_json_values:
        raise InvalidRequest(f"The body exceeds the limit of {limits.max_json_values} values (server.max_json_values).")
    if containers > limits.max_json_depth:
        if marks.count(b"}") + marks.count(b"]") != containers:
            raise InvalidRequest("The body is not valid JSON: unbalanced brackets.")
        if _is_deeper(marks, limits.max_json_depth):
            raise InvalidRequest(
                f"The body exceeds the limit of {limits.max_json_depth} nesting levels (server.max_json_depth)."
            )


def _is_deeper(marks: bytes, levels: int) -> bool:
    """Whether brackets are left after peeling off the innermost pairs that many times.

    All brackets are taken for one kind: those that do not match are for the parser to find. There are few: as many
    closing as opening ones.
    """
    brackets = marks.translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(levels):
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets


def _may_have_a_key_twice(pieces: list[bytes]) -> Steps[bool]:
    """Whether a name of ACTED_ON stands in quotation marks twice, or a short string has escapes that can spell one.

    These need not be keys of the top level: they can be values, or keys of nested objects.
    """
    named: list[bytes] = []
    for start in range(0, len(pieces), _PIECES_A_STEP):
        if start:
            yield
        some = pieces[start : start + _PIECES_A_STEP] if len(pieces) > _PIECES_A_STEP else pieces
        short = [piece for piece in some if len(piece) <= _LONGEST_BYTES]
        named += [piece for piece in short if piece in _SPELLINGS or (BACKSLASH in piece and b"\\u" in piece)]
    return len(named) != len(set(named)) or BACKSLASH in b"".join(named)


def _duplicate_key(layout: Layout) -> str | None:
    """A field that the gateway acts on, and that is there twice at the top level, in whatever spelling."""
    seen = set()
    for place in layout.top_level_keys():
        key = layout.pieces[place]
        if len(key) <= _LONGEST_BYTES and (name := spelled_out(key)) in _SPELLINGS:
            if name in seen:
                return name.decode()
            seen.add(name)
    return None
