"""What of a request decides its tokens, as bytes: spelled the same whatever JSON spelling the client used."""

from typing import Any

import orjson

_OPENING = ("system", "instructions", "tools")


def canonical_prompt(document: dict[str, Any]) -> bytes:
    """The prompt's canonical bytes: system text and tools first, as chat templates put them, then the turns.

    A longer conversation begins with the bytes of a shorter one. Of a list of prompts the first one speaks for all.
    """
    opening = [document[key] for key in _OPENING if document.get(key)]
    turns = document.get("messages")
    if turns is None:
        turns = document.get("prompt")
        if turns is None:
            turns = document.get("input")
        if isinstance(turns, str):
            turns = [turns]
        elif isinstance(turns, list) and turns and type(turns[0]) is not int:
            turns = turns if isinstance(turns[0], dict) else turns[:1]
    try:
        text = orjson.dumps(turns)[1:-1]
        return orjson.dumps(opening) + text if opening else text
    except (orjson.JSONEncodeError, TypeError):
        return b""


def sequences_of(document: dict[str, Any]) -> int:
    """How many sequences the engine runs at once for this: `n` (or `best_of`) times the number of prompts."""
    prompts = document.get("prompt")
    count = len(prompts) if isinstance(prompts, list) and prompts and type(prompts[0]) is not int else 1
    n = max(_positive(document.get("n")), _positive(document.get("best_of")))
    return count * n


def inputs_of(document: dict[str, Any]) -> int:
    """How many sequences a pooling request makes: inputs, or documents to be scored."""
    for key in ("input", "documents", "text_2", "queries", "data_2"):
        value = document.get(key)
        if isinstance(value, list) and value and type(value[0]) is not int:
            return len(value)
    return 1


def _positive(value: Any) -> int:
    return value if type(value) is int and value > 0 else 1
