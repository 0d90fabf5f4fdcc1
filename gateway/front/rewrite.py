"""Changing fields of a JSON body, and nothing else of it."""

from typing import Any

import orjson

from gateway.front.quotes import Layout, spelled_out

_SPACES = b" \t\r\n"


def with_fields(body: bytes, document: dict[str, Any], layout: Layout, changes: dict[str, Any]) -> bytes:
    """The body with top-level fields added or replaced.

    `document` is the body, parsed, and `layout` where its strings are. No field that changes is there twice.
    """
    present = {name.encode(): name for name in changes if name in document}
    edits = [
        (start, end, orjson.dumps(changes[name]))
        for name, start, end in (_values(body, layout, present) if present else ())
    ]
    if len(present) < len(changes):
        end = body.rindex(b"}")
        fields = orjson.dumps({name: value for name, value in changes.items() if name not in document})[1:-1]
        edits.append((end, end, b"," + fields if document else fields))
    parts: list[bytes | memoryview] = []
    view, done = memoryview(body), 0
    for start, end, text in sorted(edits):
        parts += (view[done:start], text)
        done = end
    parts.append(view[done:])
    return b"".join(parts)


def _values(body: bytes, layout: Layout, names: dict[bytes, str]) -> list[tuple[str, int, int]]:
    """The name of each of these fields, and from where to where its value goes."""
    pieces, keys = layout.pieces, layout.top_level_keys()
    found = []
    for key, following in zip(keys, [*keys[1:], 0], strict=True):
        name = names.get(spelled_out(pieces[key]))
        if name is not None:
            start = layout.offset(key + 1) + pieces[key + 1].index(b":") + 1
            after = following - 1
            end = layout.offset(after) + pieces[after].rindex(b",") if following else body.rindex(b"}")
            value = body[start:end]
            start += len(value) - len(value.lstrip(_SPACES))
            end -= len(value) - len(value.rstrip(_SPACES))
            found.append((name, start, end))
    return found
