"""Changing one field of a JSON body, and nothing else of it."""

import json
import re
from typing import Any

import orjson

from gateway.front.guards import ESCAPED_LETTER


def with_field(body: bytes, document: dict[str, Any], name: str, value: Any) -> bytes:
    """The body with one top-level field added or replaced. `document` is the body, parsed."""
    key, encoded = orjson.dumps(name), orjson.dumps(value)
    if name not in document:
        end = body.rindex(b"}")
        comma = b"" if body[:end].rstrip().endswith(b"{") else b","
        return b"%b%b%b:%b}" % (body[:end], comma, key, encoded)
    # With escaped letters the one place where the name stands as it is may be in a nested object.
    if isinstance(document[name], str) and not ESCAPED_LETTER.search(body):
        pattern = re.compile(re.escape(key) + rb'(\s*:\s*)"(?:[^"\\]|\\.)*"')
        changed, count = pattern.subn(lambda match: key + match[1] + encoded, body)
        if count == 1:
            return changed
    whole = json.loads(body)  # not orjson: it would change integers beyond 64 bits
    whole[name] = value
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()
