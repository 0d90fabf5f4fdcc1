"""An answer that arrives as a stream with token ids, and may be cut and continued by another request.

What is kept of a cut stream ends at a chunk of one token that had text. After it no character is half decoded: an
engine that continues from half a character begins with the text of the whole prompt. Chunks of several tokens do not
show that.

The events of one stream differ in their text and token ids only, but for the first and the last ones. So one of them is
parsed by itself, and those like it in one go.
"""

import re
from array import array
from typing import Any, Final, NamedTuple

import orjson

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_MESSAGE_FIELDS: Final = frozenset(("role", "content", "reasoning", "reasoning_content"))
_PIECE_BYTES: Final = 64  # of memory, besides its letters
_MOST_EVENT_BYTES: Final = 2097152  # the token ids of the longest prompt of a line that is streamed
_MOST_ID: Final = 2**32 - 1
# The end of an event of text, from the name of the text: up to the text, up to the ids, and what follows these.
_TEXT_EVENT: Final = re.compile(
    rb'("(?:content|text)": ?")(?:[^"\\]|\\.)*("[^\[\]]*"token_ids": ?)\[[0-9, ]*(\][^\[]*)', re.DOTALL
)


class StreamUnusable(Exception):
    """The stream is not that of the request, or has what cannot be put together: the line has to be sent whole."""


class _Frame(NamedTuple):
    """What events of a stream have in common: the bytes before the text, between it and `[` of the ids, and after."""

    before: bytes
    between: bytes
    after: bytes


class PartialAnswer:
    """The answer to one line, over as many streams as it takes.

    `model`: that of the first stream; another one has other token ids. `continues`: false = it always starts anew.
    """

    def __init__(self, model: str, *, is_chat: bool, continues: bool = True) -> None:
        self.model = model
        self.continues = continues
        self.is_chat = is_chat
        self._prompt: array[int] | None = None  # ids of the line's own prompt
        self._ids = array("I")  # generated
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._size_bytes = 0  # of the texts
        self._sure_tokens = self._sure_texts = 0  # of these, what can be continued from
        self._head: dict[str, Any] = {}  # of the first chunk
        self._begin()

    def _begin(self) -> None:
        self._sent_tokens = len(self._ids)  # with the prompt of the stream
        self._has_prompt = False
        self._finish: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._fingerprint: str | None = None
        self._rest = bytearray()  # of an event that is not complete
        self._frame: _Frame | None = None

    @property
    def tokens(self) -> int:
        """How many tokens of the answer are there, of all streams."""
        return len(self._ids)

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        prompt = len(self._prompt) if self._prompt is not None else 0
        pieces = len(self._texts) + len(self._reasoning)
        return 4 * (len(self._ids) + prompt) + self._size_bytes + _PIECE_BYTES * pieces + len(self._rest)

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream, cut anywhere. Raises StreamUnusable."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            if len(self._rest) > _MOST_EVENT_BYTES:
                raise StreamUnusable(f"The stream has an event that exceeds the limit of {_MOST_EVENT_BYTES} bytes.")
            return
        lines = (bytes(self._rest) + data[:end]).split(b"\n")
        self._rest = bytearray(data[end:])
        events = [line for line in lines if len(line) > len(_DATA)]
        at, are_alike = 0, True
        while at < len(events):
            if self._frame is not None and are_alike and not self._finish:
                count = self._take_alike(events[at:], self._frame)
                are_alike = count > 0
                at += count
            if at < len(events):
                self._take_line(events[at])
                at += 1

    def _take_alike(self, events: list[bytes], frame: _Frame) -> int:
        """Take the first of these events, as far as they differ in text and ids only. Returns how many that were."""
        before, between, after = frame
        count, start, end = len(events), len(before), -len(after)
        while count and not (events[count - 1].startswith(before) and between in events[count - 1]):
            count -= 1  # the one with the finish reason, and those after it
        events = events[:count]
        alike = [event[start:end] for event in events]  # from the text up to the last id
        if b"\n".join(events)[start:end] != (after + b"\n" + before).join(alike):
            return 0
        rows = b',"'.join(alike).replace(between + b"[", b'",')  # the text of each, and its ids
        try:
            found: list[Any] = orjson.loads(b'["%b]' % rows)
        except orjson.JSONDecodeError:
            return 0
        sure = len(found)  # after the last event of one token that had text
        while sure and (type(found[sure - 2]) is not str or not found[sure - 2]):
            sure -= 1
            while type(found[sure]) is not str:
                sure -= 1
        if len([each for each in found if type(each) is str]) != count:
            return 0
        self._add_rows(found[:sure])
        if sure:
            self._sure_tokens, self._sure_texts = len(self._ids), len(self._texts)
        self._add_rows(found[sure:])
        return count

    def _add_rows(self, rows: list[Any]) -> None:
        """The text of each event, and the ids of its tokens."""
        _extend(self._ids, [each for each in rows if type(each) is not str])
        if text := "".join([each for each in rows if type(each) is str]):
            self._texts.append(text)
            self._size_bytes += len(text)

    def _take_line(self, line: bytes) -> None:
        """Take an event by itself; other lines are framing of chunks, or comments."""
        event = line[len(_DATA) :].strip()
        if line.startswith(_DATA) and event != _DONE:
            self._take(_object(event), line)

    def cut(self) -> bool:
        """The stream is cut: go back to where it can be continued. False = nothing is left, the line starts anew."""
        if not self.continues:
            return False
        del self._ids[self._sure_tokens :]
        del self._texts[self._sure_texts :]
        self._size_bytes = sum(map(len, self._texts))
        self._begin()
        return self._sure_tokens > 0

    def replay(self) -> list[int]:
        """The prompt of the next stream: the line's own, and what is generated."""
        assert self._prompt is not None, "tokens are generated for a prompt"
        return [*self._prompt, *self._ids]

    def body(self) -> bytes:
        """The whole answer, as if it had not been streamed. Raises StreamUnusable if it is not complete."""
        usage = self._usage
        if usage is None or not self._finish.get("finish_reason") or not self._head:
            raise StreamUnusable("The stream ended without a finish reason or usage.")
        text, reasoning = "".join(self._texts), "".join(self._reasoning)
        made = self._chat(text, reasoning) if self.is_chat else self._completion(text)
        return orjson.dumps(made | {"system_fingerprint": self._fingerprint, "usage": self._whole_usage(usage)})

    def _take(self, event: dict[str, Any], line: bytes) -> None:
        if type(usage := event.get("usage")) is dict:
            self._usage = usage
        if type(fingerprint := event.get("system_fingerprint")) is str:
            self._fingerprint = fingerprint
        choices = event.get("choices")
        if not choices:
            return
        if type(choices) is not list or len(choices) != 1 or type(choice := choices[0]) is not dict:
            raise StreamUnusable("The stream has several choices.")
        if not self._head:
            self._head = {name: event.get(name) for name in ("id", "created", "model")}
        if self._has_prompt:
            if self._frame is None:
                self._frame = _frame_of(line, event, is_chat=self.is_chat)
        else:
            self._check_prompt(event.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        if choice.get("finish_reason") is not None:
            self._finish = {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
        self._add(self._text_of(choice), choice.get("token_ids"))

    def _check_prompt(self, ids: Any) -> None:
        """The first chunk has the prompt as the engine has read it: one that ignores a replay shows it here."""
        self._has_prompt = True
        if self._sent_tokens:
            if type(ids) is not list or ids != self.replay():
                raise StreamUnusable("The engine did not continue from the token ids.")
        elif type(ids) is list and ids:
            self._prompt = array("I")
            _extend(self._prompt, ids)
        else:
            self.continues = False

    def _text_of(self, choice: dict[str, Any]) -> str:
        if not self.is_chat:
            return str(choice.get("text") or "")
        delta = choice.get("delta") or {}
        if len(delta) == 1 and type(content := delta.get("content")) is str:
            return content
        if any(value for name, value in delta.items() if name not in _MESSAGE_FIELDS):
            raise StreamUnusable("The stream has more than text.")
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            self.continues = False  # the engine's parser would begin anew
            self._reasoning.append(reasoning)
            self._size_bytes += len(reasoning)
        return str(delta.get("content") or "")

    def _add(self, text: str, ids: Any) -> None:
        if ids:
            _extend(self._ids, ids)
        elif text:
            self.continues = False  # of this text no ids are known
        if text:
            self._texts.append(text)
            self._size_bytes += len(text)
            if ids and len(ids) == 1 and not self._finish:
                self._sure_tokens, self._sure_texts = len(self._ids), len(self._texts)

    def _whole_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The usage of all streams together: tokens that were replayed are part of the answer, not of the prompt."""
        prompt = usage.get("prompt_tokens", 0) - self._sent_tokens
        completion = usage.get("completion_tokens", 0) + self._sent_tokens
        details: Any = usage.get("prompt_tokens_details")
        if type(details) is dict:
            details = {"cached_tokens": None, "created_cache_tokens": None, "multimodal_tokens": None} | details
            cached: Any = details["cached_tokens"]
            if self._sent_tokens and type(cached) is int:
                details["cached_tokens"] = min(cached, prompt)
        return {
            **usage,
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
            "completion_tokens_details": usage.get("completion_tokens_details"),
        }

    def _chat(self, text: str, reasoning: str) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": text or (None if reasoning else ""),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": reasoning or None,
        }
        choice = {"index": 0, "message": message, "logprobs": None, **self._finish, "token_ids": None}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "service_tier": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
        }

    def _completion(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, **self._finish, "token_ids": None}
        choice |= {"prompt_logprobs": None, "prompt_token_ids": None}
        return {
            **self._head,
            "object": "text_completion",
            "choices": [choice],
            "service_tier": None,
            "kv_transfer_params": None,
        }


def _object(event: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(event)
    except orjson.JSONDecodeError:
        raise StreamUnusable("The stream has an event that is not JSON.") from None
    if type(found) is not dict:
        raise StreamUnusable("The stream has an event that is not an object.")
    return found


def _frame_of(line: bytes, event: dict[str, Any], *, is_chat: bool) -> _Frame | None:
    """The frame of this event's stream, if the event has text and ids, and nothing else that counts."""
    choice = event["choices"][0]
    if event.get("usage") is not None or choice.get("finish_reason") is not None or not choice.get("token_ids"):
        return None
    delta = choice.get("delta")
    if is_chat and (type(delta) is not dict or delta.keys() != {"content"}):
        return None
    ids = line.rfind(b'"token_ids":')
    start = max(line.rfind(name, 0, ids) for name in (b'"content":', b'"text":'))  # one place: a search tries them all
    found = _TEXT_EVENT.fullmatch(line, start) if 0 <= start < ids else None
    if found is None:
        return None
    frame = _Frame(line[:start] + found[1], found[2], found[3])
    try:
        other = orjson.loads(b"%b?%b[7%b" % (frame.before[len(_DATA) :], frame.between, frame.after))
    except orjson.JSONDecodeError:
        return None
    # Another text in this place is that of the answer, and nothing else changes.
    text = {"delta": {"content": "?"}} if is_chat else {"text": "?"}
    return frame if other == event | {"choices": [choice | text | {"token_ids": [7]}]} else None


def _extend(known: "array[int]", ids: Any) -> None:
    try:
        known.fromlist(ids)
    except (TypeError, OverflowError):
        raise StreamUnusable(f"The stream has token ids that are not numbers from 0 to {_MOST_ID}.") from None
