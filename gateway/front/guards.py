"""Checks on a JSON body before it is parsed, so that no body can hurt the event loop or fool a backend.

A byte limit alone is not enough: 16 MiB of `{"a":{}},` takes seconds and 28 times its size to parse. Splitting the body
at its quotation marks, once, gives all that is needed: what stands outside strings has every bracket and comma, and the
strings show whether a key can be there twice.
"""

import json
import re
from typing import Any

import orjson

from gateway.config import ServerConfig
from gateway.errors import InvalidRequest

# Fields that the gateway acts on. A second one of these could mean another thing to the backend.
POLICY_KEYS = {
    name: name.encode()
    for name in ("model", "stream", "n", "best_of", "messages", "prompt", "input", "max_tokens",
                 "max_completion_tokens", "cache_salt", "stream_options", "tools", "system", "instructions")
}  # fmt: skip
# Fields that could make a backend act for somebody else, or load what a client chose.
REFUSED_KEYS = frozenset(("api_base", "api_key", "base_url", "extra_headers", "user_config", "prompt_embeds"))

_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_SQUARE = bytes.maketrans(b"{}", b"[]")
# Any letter that a policy key is made of, spelled as an escape.
ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|6[0-9a-fA-F]|7[0-9aA])")


def parse_body(body: bytes, limits: ServerConfig) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest that says what is wrong."""
    pieces = _split_at_quotes(body, limits.max_json_strings)
    _check_shape(b"".join(pieces[::2]), limits)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if type(document) is not dict:
        raise InvalidRequest("The body must be a JSON object.")
    if duplicate := _duplicate_key(body, pieces[1::2], document):
        raise InvalidRequest(f"The key {duplicate!r} is there twice.", param=duplicate)
    if not REFUSED_KEYS.isdisjoint(document):
        name = min(REFUSED_KEYS.intersection(document))
        raise InvalidRequest(f"The field {name!r} is not accepted here.", param=name)
    return document


def _split_at_quotes(body: bytes, max_strings: int) -> list[bytes]:
    """Alternately what is outside strings and what is in them. Escaped quotation marks do not end a string."""
    pieces = body.split(b'"', 2 * max_strings + 1)
    if len(pieces) > 2 * max_strings + 1:
        raise InvalidRequest(f"The body holds over {max_strings} strings or quotation marks, the most accepted.")
    if b"\\" not in body:
        return pieces
    merged: list[bytes] = []
    open_string: list[bytes] = []
    for piece in pieces:
        inside = bool(open_string) or len(merged) % 2 == 1
        if inside and piece.endswith(b"\\") and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            open_string.append(piece)
        elif open_string:
            open_string.append(piece)
            merged.append(b'"'.join(open_string))
            open_string = []
        else:
            merged.append(piece)
    return [*merged, b'"'.join(open_string)] if open_string else merged


def _check_shape(outside: bytes, limits: ServerConfig) -> None:
    """Bounds on objects, arrays, values and nesting; `outside` is the body without its strings."""
    containers = outside.count(b"{") + outside.count(b"[")
    if containers > limits.max_json_containers:
        raise InvalidRequest(f"The body holds over {limits.max_json_containers} objects and arrays, the most accepted.")
    if len(outside) > limits.max_json_values and outside.count(b",") > limits.max_json_values:
        raise InvalidRequest(f"The body holds over {limits.max_json_values} values, the most accepted.")
    if containers > limits.max_json_depth and _is_deeper(outside, limits.max_json_depth):
        raise InvalidRequest(f"The body is nested more than {limits.max_json_depth} levels deep.")


def _is_deeper(outside: bytes, levels: int) -> bool:
    """Whether brackets are left after peeling off the innermost pairs that many times.

    All brackets are taken for one kind: those that do not match are for the parser to find.
    """
    brackets = outside.translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(levels):
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets


def _duplicate_key(body: bytes, strings: list[bytes], document: dict[str, Any]) -> str | None:
    """A policy key that is there twice at the top level, in whatever spelling.

    A name that stands in quotation marks once cannot be a key twice, unless its letters are escaped: only a body that
    has such a name more than once, perhaps in a nested object, is parsed again to look at the keys of the top level.
    """
    for key in document:
        if key in POLICY_KEYS and strings.count(POLICY_KEYS[key]) > 1:
            break
    else:
        if b"\\" not in body or b"\\u00" not in body or not ESCAPED_LETTER.search(body):
            return None
    top: list[str] = []

    def remember(pairs: list[tuple[str, Any]]) -> None:
        top[:] = [name for name, _ in pairs]  # the outermost object comes last

    json.loads(body, object_pairs_hook=remember, parse_int=len, parse_float=len)
    return next((name for name in top if name in POLICY_KEYS and top.count(name) > 1), None)
