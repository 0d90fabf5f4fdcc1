"""An answer that arrives as a stream with token ids, and may be cut and continued by another request.

What is kept of a cut stream ends at a chunk of one token that had text. After it no character is half decoded: an
engine that continues from half a character begins with the text of the whole prompt. Chunks of several tokens do not
show that.
"""

from array import array
from typing import Any, Final

import orjson

from gateway.core.errors import WrongAnswer

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_MESSAGE_FIELDS: Final = frozenset(("role", "content", "reasoning", "reasoning_content"))
_MOST_EVENT_BYTES: Final = 2097152  # the token ids of the longest prompt of a line that is streamed
_MOST_ID: Final = 2**32 - 1


class StreamUnusable(WrongAnswer):
    """The stream is not that of the request, or has what cannot be put together: the line has to be sent whole."""


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
        self._text, self._reasoning = bytearray(), bytearray()  # an object for each piece would take more memory
        self._sure_tokens = self._sure_bytes = 0  # of ids and text, what can be continued from
        self._head: dict[str, Any] = {}  # of the first chunk
        self._begin()

    def _begin(self) -> None:
        self._sent_tokens = len(self._ids)  # with the prompt of the stream
        self._has_prompt = False
        self._finish: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._fingerprint: str | None = None
        self._rest = bytearray()  # of an event that is not complete

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        prompt = len(self._prompt) if self._prompt is not None else 0
        return 4 * (len(self._ids) + prompt) + len(self._text) + len(self._reasoning) + len(self._rest)

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
        for line in lines:
            if line.startswith(_DATA):  # others are framing of chunks, or comments
                event = line[len(_DATA) :].strip()
                if event and event != _DONE:
                    self._take(_object(event))

    def cut(self) -> bool:
        """The stream is cut: go back to where it can be continued. False = nothing is left, the line starts anew."""
        if not self.continues:
            return False
        del self._ids[self._sure_tokens :]
        del self._text[self._sure_bytes :]
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
        text, reasoning = self._text.decode(), self._reasoning.decode()
        made = self._chat(text, reasoning) if self.is_chat else self._completion(text)
        return orjson.dumps(made | {"system_fingerprint": self._fingerprint, "usage": self._whole_usage(usage)})

    def _take(self, event: dict[str, Any]) -> None:
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
        if not self._has_prompt:
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
            self._reasoning += str(reasoning).encode()
        return str(delta.get("content") or "")

    def _add(self, text: str, ids: Any) -> None:
        if ids:
            _extend(self._ids, ids)
        elif text:
            self.continues = False  # of this text no ids are known
        if text:
            self._text += text.encode()
            if ids and len(ids) == 1 and not self._finish:
                self._sure_tokens, self._sure_bytes = len(self._ids), len(self._text)

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


def _extend(known: "array[int]", ids: Any) -> None:
    try:
        known.fromlist(ids)
    except (TypeError, OverflowError):
        raise StreamUnusable(f"The stream has token ids that are not numbers from 0 to {_MOST_ID}.") from None
