"""The beginning of a stream's output: its first event with a piece of it.

The events before are structure: the head of a message, a role, the start of a response. Engines may send them before
the prefill. They are held until the first token, so that until then a retry can give the whole answer.
"""

import re
from typing import Any, Final

import orjson

from gateway.core.errors import MemoryFull
from gateway.core.resources import Holding

_EVENT_END = re.compile(rb"(\n\r?\n)")
# Of Responses and of Messages. Others are deltas, the end of something, or unknown: none of these is held.
_STRUCTURE: Final = frozenset(
    (
        "response.created", "response.queued", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.reasoning_summary_part.added", "message_start", "content_block_start",
        "ping",
    )
)  # fmt: skip
_NAME = re.compile(rb"event: ?([\w.]+)\r?\n")
# A chat or completion that begins with text, as most engines print it: nothing has to be held or parsed.
BEGINS_WITH_TEXT = re.compile(
    rb'data: ?\{[^\[]*+(?:(?<="choices":)|(?<="choices": ))\[\{(?:"index": ?\d+, ?)?'
    rb'(?:"delta": ?\{(?:"role": ?"assistant", ?)?"content"|"text"): ?"[^"]'
)
_PIECES: Final = ("text", "token_ids", "finish_reason")
_KINDS: Final = frozenset(("role", "type"))  # fields of a delta that are no output


class Opening:
    """A stream up to its first token, held in memory that `holding` reserves, at most `limit_bytes` of it.

    Excess over either is passed on, with all later bytes. `has_output`: the first token has arrived.
    """

    def __init__(self, holding: Holding, limit_bytes: int) -> None:
        self.has_output = self.has_ids = False
        self._holding = holding
        self._room_bytes = limit_bytes
        self._held: list[bytes] = []
        self._tail = b""  # of an event that is too long to be kept, while its end has not come

    def take(self, data: bytes) -> bytes:
        """Add bytes; returns the bytes to pass on: whole events, or parts of an overlong event."""
        # Events and, after each, its end; at last nothing, or the start of an event. An end may come in two parts.
        pieces = _EVENT_END.split(self._tail + data)
        begun = pieces[2 if self._tail else 0 :: 2]
        self._tail = pieces[-1][-2:]
        self.has_ids = self.has_ids or any(b"\nid:" in b"\n" + event for event in begun)
        self.has_output = any(map(has_output, begun))
        if not self.has_output and self._keeps(data):
            return b""
        self._room_bytes = 0
        return b"".join([*self.drop(), data])

    def drop(self) -> list[bytes]:
        """The held bytes, which are released."""
        held, self._held = self._held, []
        self._holding.release()
        return held

    def _keeps(self, data: bytes) -> bool:
        self._room_bytes -= len(data)
        if self._room_bytes < 0:
            return False
        try:
            self._holding.add(len(data))
        except MemoryFull:
            return False
        self._held.append(data)
        return True


def has_output(event: bytes) -> bool:
    """Whether an event has a piece of the output, ends the stream, or is of an unknown kind.

    Of an event that is too long, the start is enough.
    """
    name = _NAME.match(event)
    if name is not None and name[1].decode() in _STRUCTURE:
        return False
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return False
    try:
        document = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return True
    return type(document) is not dict or _says(document)


def _says(document: dict[str, Any]) -> bool:
    choices = document.get("choices")
    if type(choices) is list:
        return any(type(choice) is not dict or _is_piece(choice) for choice in choices)
    return document.get("type") not in _STRUCTURE and ("delta" not in document or _is_filled(document["delta"]))


def _is_piece(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk has output, or ends."""
    return any(map(choice.get, _PIECES)) or _is_filled(choice.get("delta"))


def _is_filled(delta: Any) -> bool:
    if type(delta) is dict:
        return any(value for name, value in delta.items() if name not in _KINDS)
    return bool(delta)
