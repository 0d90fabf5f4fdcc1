"""What of a request decides its tokens, as bytes: the same whatever JSON spelling the client used."""

from typing import Any

import orjson

_OPENING = ("system", "instructions", "tools")


def canonical_prompt(document: dict[str, Any]) -> bytes:
    """The prompt's canonical bytes: system text and tools first, as chat templates put them, then the turns.

    A longer conversation begins with the bytes of a shorter one. Of a list of prompts the first one speaks for all.
    """
    messages = document.get("messages")
    text = _turns(messages) if isinstance(messages, list) else _text(document.get("prompt") or document.get("input"))
    opening = [document[key] for key in _OPENING if document.get(key)]
    return orjson.dumps(opening) + text if opening else text


def _turns(messages: list[Any]) -> bytes:
    """Each turn as its role and text; whatever else a turn holds as JSON."""
    parts = []
    for message in messages:
        if type(message) is not dict:
            continue
        role, content = message.get("role"), message.get("content")
        if type(content) is str and type(role) is str and len(message) == 2:
            parts.append(f"\x1e{role}\x1f{content}")
        else:
            parts.append("\x1e" + orjson.dumps(message, option=orjson.OPT_SORT_KEYS).decode())
    return "".join(parts).encode()


def _text(prompt: Any) -> bytes:
    if type(prompt) is list and prompt and type(prompt[0]) is not int:
        if type(prompt[0]) is dict:
            return _turns(prompt)
        prompt = prompt[0]
    return prompt.encode() if type(prompt) is str else orjson.dumps(prompt)[1:-1]


def sequences_of(document: dict[str, Any]) -> int:
    """How many sequences the engine runs at once for this: `n` (or `best_of`) times the number of prompts."""
    prompts = document.get("prompt")
    count = len(prompts) if type(prompts) is list and prompts and type(prompts[0]) is not int else 1
    return count * max(_positive(document.get("n")), _positive(document.get("best_of")))


def inputs_of(document: dict[str, Any]) -> int:
    """How many sequences a pooling request makes: inputs, or documents to be scored."""
    for key in ("input", "documents", "text_2", "queries", "data_2"):
        value = document.get(key)
        if type(value) is list and value and type(value[0]) is not int:
            return len(value)
    return 1


def _positive(value: Any) -> int:
    return value if type(value) is int and value > 0 else 1
