"""Changing fields of a JSON body, and nothing else of it."""

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.front.quotes import Layout, layout_of, spelled_out
from gateway.front.steps import Steps

_SPACES = b" \t\r\n"


def with_fields(body: bytes, document: dict[str, Any], changes: dict[str, Any]) -> Steps[bytes]:
    """The body with top-level fields added or replaced. `document` is the body, parsed; none of them is there twice."""
    added = {name: value for name, value in changes.items() if name not in document}
    edits: list[tuple[int, int, bytes]] = []
    if added:
        end = body.rindex(b"}")
        edits.append((end, end, b"," + orjson.dumps(added)[1:-1] if document else orjson.dumps(added)[1:-1]))
    if len(added) < len(changes):
        layout = yield from layout_of(body)
        edits += [(start, end, orjson.dumps(changes[name])) for name, start, end in _values(body, layout, changes)]
        edits.sort()
    parts: list[bytes | memoryview] = []
    view, done = memoryview(body), 0
    for start, end, text in edits:
        parts += (view[done:start], text)
        done = end
    parts.append(view[done:])
    return b"".join(parts)


def _values(body: bytes, layout: Layout, names: Iterable[str]) -> list[tuple[str, int, int]]:
    """The name of each of these fields that the body has, and from where to where its value goes."""
    pieces, keys = layout.pieces, layout.top_level_keys()
    wanted = {name.encode(): name for name in names}
    found = []
    for key, following in zip(keys, [*keys[1:], 0], strict=True):
        name = wanted.get(spelled_out(pieces[key]))
        if name is not None:
            start = layout.offset(key + 1) + pieces[key + 1].index(b":") + 1
            after = following - 1
            end = layout.offset(after) + pieces[after].rindex(b",") if following else body.rindex(b"}")
            value = body[start:end]
            start += len(value) - len(value.lstrip(_SPACES))
            end -= len(value) - len(value.rstrip(_SPACES))
            found.append((name, start, end))
    return found
