"""What of a request decides its tokens, as bytes: the same whatever JSON spelling the client used."""

from array import array
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64_hexdigest

# What a chat template or the tokenization is given besides the turns, in the order in which templates use it.
_OPENING = (
    "system", "instructions", "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort",
    "reasoning", "add_special_tokens", "add_generation_prompt", "continue_final_message", "truncate_prompt_tokens",
    "mm_processor_kwargs", "media_io_kwargs", "previous_response_id",
)  # fmt: skip
_NOT_MESSAGES = frozenset((*_OPENING, "tool_choice"))
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_TURN_FIELDS = frozenset(("role", "content"))


class Prompt(NamedTuple):
    """The prompt's canonical bytes, message by message.

    `media`: images, sounds and files, which stand there by their digest. `answer`: the piece that is the last
    answer which the conversation already has, or -1. `token_ids`: what the client gave in place of text, four bytes
    each. `more_bytes`: size of the other prompts, where there are several.
    """

    pieces: list[bytes]
    media: int = 0
    answer: int = -1
    token_ids: list[int] | None = None
    more_bytes: int = 0

    @property
    def text(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces)


def canonical_prompt(document: dict[str, Any]) -> Prompt:
    """System text and tools first, as chat templates put them, then the turns.

    A longer conversation begins with the pieces of a shorter one. Of a list of prompts the first one speaks for all.
    """
    turns = document.get("messages")
    prompt = _turns(turns) if type(turns) is list else _text(document.get("prompt") or document.get("input"))
    if _NOT_MESSAGES.isdisjoint(document):
        return prompt
    opening = [(key, document[key]) for key in _OPENING if key in document and document[key] not in (None, "", [], {})]
    if document.get("tool_choice") == "none":
        opening.append(("tool_choice", "none"))
    if not opening:
        return prompt
    answer = prompt.answer + 1 if prompt.answer >= 0 else -1
    return prompt._replace(pieces=[orjson.dumps(opening), *prompt.pieces], answer=answer)


def _turns(messages: list[Any]) -> Prompt:
    pieces: list[bytes] = []
    media, answer = 0, -1
    for message in messages:
        if type(message) is not dict:
            continue
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            answer = len(pieces)
        if type(content) is str and len(message) == 2:
            pieces.append(f"\x1e{role}\x1f{content}".encode())
        else:
            text, its_media = _content(content)
            others = {key: value for key, value in message.items() if key not in _TURN_FIELDS and value is not None}
            extra = orjson.dumps(others, option=orjson.OPT_SORT_KEYS).decode() if others else ""
            pieces.append(f"\x1e{role}\x1f{text}{extra}".encode())
            media += its_media
    return Prompt(pieces, media, answer)


def _content(content: Any) -> tuple[str, int]:
    """The text of a turn's content, and how many of its parts are something else."""
    if type(content) is str:
        return content, 0
    if type(content) is not list:
        return ("" if content is None else orjson.dumps(content).decode()), 0
    texts, media = [], 0
    for part in content:
        if type(part) is str:
            texts.append(part)
        elif type(part) is dict and part.get("type") in _TEXT_PARTS and type(part.get("text")) is str:
            texts.append(part["text"])
        else:
            texts.append(f"\x1d{xxh3_64_hexdigest(orjson.dumps(part))}")
            media += 1
    return "\x1c".join(texts), media  # templates put something, or nothing, between parts: never what one text has


def _text(prompt: Any) -> Prompt:
    if type(prompt) is not list or not prompt or type(prompt[0]) is int:
        return _one(prompt)
    if type(prompt[0]) is dict:
        return _turns(prompt)
    more = [each for each in prompt[1:] if type(each) in (str, list)]
    return _one(prompt[0])._replace(more_bytes=sum(len(each) * (1 if type(each) is str else 4) for each in more))


def _one(prompt: Any) -> Prompt:
    """A text, or token ids."""
    if type(prompt) is str:
        return Prompt([prompt.encode()])
    if type(prompt) is list and prompt:
        try:
            return Prompt([array("I", prompt).tobytes()], token_ids=prompt)
        except (TypeError, OverflowError):
            pass  # not token ids: the backend will say so
    return Prompt([orjson.dumps(prompt)[1:-1]])


def sequences_of(document: dict[str, Any]) -> int:
    """How many sequences the engine runs at once for this: `n` (or `best_of`) times the number of prompts."""
    prompts = document.get("prompt")
    count = len(prompts) if type(prompts) is list and prompts and type(prompts[0]) is not int else 1
    return count * max(_positive(document.get("n")), _positive(document.get("best_of")))


def inputs_of(document: dict[str, Any]) -> int:
    """How many sequences a pooling request makes: inputs, or documents to be scored."""
    for key in ("input", "documents", "items", "text_2", "data_2", "queries"):
        value = document.get(key)
        if type(value) is list and value and type(value[0]) is not int:
            return len(value)
    return 1


def _positive(value: Any) -> int:
    return value if type(value) is int and value > 0 else 1
