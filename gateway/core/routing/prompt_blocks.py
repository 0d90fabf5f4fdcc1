"""A prompt as prefix blocks: its canonical bytes, and their chained xxh3 hashes.

The bytes are the same for every JSON spelling of a request. Blocks end at the end of every message and at growing steps
between, so two prompts share their first k keys exactly when they share the seed and the bytes before the k-th edge.
Steps grow with their position, from 256 bytes to 4 KiB: text that diverges inside a message costs at most an eighth of
the hit (or 256 bytes), and a 200 KB prompt has a hundred keys. Shared whole messages (a system prompt, the turns
before) are found to their last byte.
"""

from array import array
from dataclasses import dataclass
from typing import Any, Final

import orjson
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from gateway._native import LONGEST_BYTES, text_turns
from gateway.core.turns import Steps, at_once


def seed(*parts: str) -> int:
    """The chain's start: a hash of the other inputs of the KV cache (model, LoRA, cache salt, tenant)."""
    return xxh3_64_intdigest("\0".join(f"{len(part)}:{part}" for part in parts).encode())


# Inputs of chat templates and tokenization besides the turns, in the order in which templates use them.
_TEMPLATE = ("system", "instructions", "tools", "documents", "chat_template", "chat_template_kwargs")
_REASONING = ("reasoning_effort", "reasoning")
_ENDS = ("add_special_tokens", "add_generation_prompt", "continue_final_message", "truncate_prompt_tokens")
_MEDIA_AND_HISTORY = ("mm_processor_kwargs", "media_io_kwargs", "previous_response_id", "previous_input_messages")
_OPENING = (*_TEMPLATE, *_REASONING, *_ENDS, *_MEDIA_AND_HISTORY)
OPENING: Final = frozenset((*_OPENING, "tool_choice"))
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_INPUTS: Final[tuple[str, ...]] = (
    *("input", "documents", "items", "text_2", "data_2", "queries"),
    *("texts", "images", "inputs"),
)
_text_turns: Final = text_turns  # compiled code looks up a global for each request, a Final once
_TURN_FIELDS = frozenset(("role", "content"))
_LEAST_BYTES = 512  # least size that a turn or part counts with: at most 4096 of them become blocks
_QUERIES = ("query", "text_1", "queries", "data_1")  # of scored texts: the first present one
_BYTES_A_CHARACTER = 3  # where not all of them are ASCII
_ITEMS_A_STEP = 8192
_MOST_IDS = LONGEST_BYTES // 4
_MOST_SHOWN = 4096  # items of a prompt that is neither text nor token ids


@dataclass(slots=True, init=False)
class Prompt:
    """The prompt's canonical bytes, message by message.

    `media`: number of images, sounds and files, which are replaced by their digest. `answer`: index of the piece with
    the conversation's last answer, or -1. `token_ids`: the prompt if the client sent token ids, four bytes each, up to
    the last prefix block. `more_bytes`: size of omitted text, one byte for each character: prompts after the first one,
    and text beyond the last prefix block.
    """

    pieces: list[bytes]
    media: int
    answer: int
    token_ids: list[int] | None
    more_bytes: int

    def __init__(
        self,
        pieces: list[bytes],
        media: int = 0,
        answer: int = -1,
        token_ids: list[int] | None = None,
        more_bytes: int = 0,
    ) -> None:
        self.pieces = pieces
        self.media = media
        self.answer = answer
        self.token_ids = token_ids
        self.more_bytes = more_bytes

    def leave_out(self, size_bytes: int, media: int = 0) -> None:
        """Count a prompt after the first one, which is not kept."""
        self.more_bytes += size_bytes
        self.media += media

    def begin_with(self, piece: bytes) -> None:
        self.pieces.insert(0, piece)
        if self.answer >= 0:
            self.answer += 1

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


def canonical_prompt(document: dict[str, Any], field: str | None = None) -> Prompt:
    """System text and tools first, as chat templates put them, then the turns.

    A longer conversation begins with the pieces of a shorter one. Of a list of prompts only the first one is used.
    `field` holds the turns or the text; None = the first known field that the document has.
    """
    if field is None:
        has_turns = type(document.get("messages")) is list
        field = "messages" if has_turns else "prompt" if document.get("prompt") else "input"
    prompt = turns_of(document, field)
    add_opening(prompt, document)
    return prompt


def turns_of(document: dict[str, Any], field: str) -> Prompt:
    """The prompt without the part before its turns."""
    given = document.get(field)
    if type(given) is not list:
        return _one(given)
    return text_prompt(given) or at_once(_listed(given, field))


def turns_in_steps(document: dict[str, Any], field: str) -> Steps[Prompt]:
    """The same, of a long body."""
    given = document.get(field)
    if type(given) is not list:
        return _one(given)
    return text_prompt(given) or (yield from _listed(given, field))


def add_opening(prompt: Prompt, fields: dict[str, Any]) -> None:
    """Put the fields of OPENING before the turns."""
    given = [(key, fields[key]) for key in _OPENING if key in fields and fields[key] not in (None, "", [], {})]
    opening = [(key, value[:LONGEST_BYTES] if type(value) is str else value) for key, value in given]
    if fields.get("tool_choice") == "none":
        opening.append(("tool_choice", "none"))
    if opening:
        prompt.begin_with(orjson.dumps(opening))


def text_prompt(messages: Any) -> Prompt | None:
    """The prompt of turns that are a role and a text each, and not too long; None = they are not."""
    texts = _text_turns(messages, LONGEST_BYTES)
    return None if texts is None else Prompt(texts[0], 0, texts[1])


def _listed(given: list[Any], field: str) -> Steps[Prompt]:
    """The prompt of turns, of token ids, or of a batch: of a batch the first one, and the size of the others."""
    converses = field == "messages"
    if type(given[0]) is dict or (converses and type(given[0]) is not list):
        return (yield from _turns(given))
    if type(given[0]) is int:
        return _one(given)
    prompt = (text_prompt(given[0]) or (yield from _turns(given[0]))) if converses else _one(given[0])
    pending = 0
    for each in given[1:]:
        if pending > _ITEMS_A_STEP:
            yield
            pending = 0
        pending += 1
        if type(each) is list and converses:
            pending += len(each)
            other = yield from _turns(each, 0)
            prompt.leave_out(other.more_bytes, other.media)
        elif type(each) is list or type(each) is str:
            prompt.leave_out(len(each) * (1 if type(each) is str else 4))
    return prompt


def _turns(messages: list[Any], room: int = LONGEST_BYTES) -> Steps[Prompt]:
    pieces: list[bytes] = []
    media, answer, more, pending = 0, -1, 0, 0
    for message in messages:
        if pending > _ITEMS_A_STEP:
            yield
            pending = 0
        pending += 1
        if type(message) is not dict:
            continue
        role, content = message.get("role"), message.get("content")
        if type(content) is list:
            pending += len(content)
            text, its_media, its_more = yield from _parts(content, room)
        elif type(content) is str:
            text, its_media, its_more = content[:room], 0, max(0, len(content) - room)
        else:
            text, its_media, its_more = "" if content is None else orjson.dumps(content).decode(), 0, 0
        others = {key: value for key, value in message.items() if key not in _TURN_FIELDS and value is not None}
        extra = orjson.dumps(others, option=orjson.OPT_SORT_KEYS) if others else b""
        media += its_media
        more += its_more
        if room <= 0:
            more += len(text) + len(extra)
            continue
        if type(role) is not str:
            role = None
        elif role == "assistant":
            answer = len(pieces)
        piece = f"\x1e{role}\x1f{text}".encode() + extra
        pieces.append(piece)
        room = max(0, room - max(len(piece), _LEAST_BYTES))
    return Prompt(pieces, media, answer, more_bytes=more)


def _parts(content: list[Any], room: int) -> Steps[tuple[str, int, int]]:
    """The first `room` characters of a turn's text, the number of its other parts, and the size of the rest of the
    text. The backend refuses any other content."""
    texts, media, more = [], 0, 0
    for number, part in enumerate(content, 1):
        if number % _ITEMS_A_STEP == 0:
            yield
        if type(part) is str:
            text = part
        elif type(part) is not dict:
            continue
        elif part.get("type") in _TEXT_PARTS and type(part.get("text")) is str:
            text = part["text"]
        else:
            text = f"\x1d{xxh3_64_hexdigest(orjson.dumps(part))}" if room > 0 else ""
            media += 1
        if room <= 0:
            more += len(text)
            continue
        if len(text) > room:
            more += len(text) - room
            text = text[:room]
        texts.append(text)
        room -= max(len(text), _LEAST_BYTES)
    # a separator that text does not contain: templates insert different ones
    return "\x1c".join(texts), media, more


def _one(prompt: Any) -> Prompt:
    if type(prompt) is str:
        return Prompt([prompt[:LONGEST_BYTES].encode()], more_bytes=max(0, len(prompt) - LONGEST_BYTES))
    if type(prompt) is list and prompt:
        ids = prompt[:_MOST_IDS]
        try:
            return Prompt([array("I", ids).tobytes()], token_ids=ids, more_bytes=4 * (len(prompt) - len(ids)))
        except (TypeError, OverflowError):
            prompt = prompt[:_MOST_SHOWN]  # not token ids: the backend will refuse it
    return Prompt([orjson.dumps(prompt)[1:-1]])


def sequences_of(document: dict[str, Any]) -> int:
    """Sequences that the engine runs for a generation request: `n` (or `best_of`) times prompts or conversations."""
    choices = 1
    for name in ("n", "best_of"):
        value = document.get(name)
        if type(value) is int and value > choices:
            choices = value
    return choices * _items(document, ("prompt",))


def inputs_of(document: dict[str, Any]) -> int:
    """Sequences of a pooling request: its inputs, documents to be scored, or conversations."""
    return _items(document, _INPUTS)


def scored_bytes(document: dict[str, Any], size_bytes: int, documents: int) -> int:
    """The approximate bytes that a model scores: most models read the query again with each document."""
    if documents < 2:
        return size_bytes
    for name in _QUERIES:
        query = document.get(name)
        if type(query) is list and len(query) == 1:
            query = query[0]
        if type(query) is str:
            return size_bytes + (documents - 1) * len(query) * (1 if query.isascii() else _BYTES_A_CHARACTER)
    return size_bytes


def _items(document: dict[str, Any], fields: tuple[str, ...]) -> int:
    """The items of the first of these fields that is a list; else the conversations. Token ids are one item."""
    for key in fields:
        value = document.get(key)
        if type(value) is list and value and type(value[0]) is not int:
            return len(value)
    turns = document.get("messages")
    return len(turns) if type(turns) is list and turns and type(turns[0]) is list else 1
