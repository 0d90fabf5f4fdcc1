"""What of a request decides its tokens, as bytes: the same whatever JSON spelling the client used."""

from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64_hexdigest

_OPENING = ("system", "instructions", "tools")
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))


class Prompt(NamedTuple):
    """The prompt's canonical bytes, and how many images, sounds or files it has, which stand there by their digest."""

    text: bytes
    media: int = 0


def canonical_prompt(document: dict[str, Any]) -> Prompt:
    """System text and tools first, as chat templates put them, then the turns.

    A longer conversation begins with the bytes of a shorter one. Of a list of prompts the first one speaks for all.
    """
    turns = document.get("messages")
    prompt = _turns(turns) if isinstance(turns, list) else _text(document.get("prompt") or document.get("input"))
    opening = [document[key] for key in _OPENING if document.get(key)]
    return Prompt(orjson.dumps(opening) + prompt.text, prompt.media) if opening else prompt


def _turns(messages: list[Any]) -> Prompt:
    parts: list[str] = []
    media = 0
    for message in messages:
        if type(message) is not dict:
            continue
        role, content = message.get("role"), message.get("content")
        if type(content) is str and len(message) == 2:
            parts += ("\x1e", str(role), "\x1f", content)
        else:
            text, its_media = _content(content)
            others = {key: value for key, value in message.items() if key not in ("role", "content")}
            extra = orjson.dumps(others, option=orjson.OPT_SORT_KEYS).decode() if others else ""
            parts.append(f"\x1e{role}\x1f{text}{extra}")
            media += its_media
    return Prompt("".join(parts).encode(), media)


def _content(content: Any) -> tuple[str, int]:
    """The text of a turn's content, and how many of its parts are something else."""
    if type(content) is str:
        return content, 0
    if type(content) is not list:
        return ("" if content is None else orjson.dumps(content).decode()), 0
    texts, media = [], 0
    for part in content:
        if type(part) is dict and part.get("type") in _TEXT_PARTS and type(part.get("text")) is str:
            texts.append(part["text"])
        else:
            texts.append(f"\x1d{xxh3_64_hexdigest(orjson.dumps(part))}")
            media += 1
    return "".join(texts), media


def _text(prompt: Any) -> Prompt:
    if type(prompt) is list and prompt and type(prompt[0]) is not int:
        if type(prompt[0]) is dict:
            return _turns(prompt)
        prompt = prompt[0]
    return Prompt(prompt.encode() if type(prompt) is str else orjson.dumps(prompt)[1:-1])


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
