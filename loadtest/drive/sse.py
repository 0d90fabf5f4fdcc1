"""Reads a token stream: finds the moments and the few events that matter, and parses no JSON while it runs."""

from __future__ import annotations

import re
from typing import Any

import orjson

# A key in front of its colon cannot occur inside a JSON string, where the quotes would be escaped.
_CONTENT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|refusal)"\s*:\s*"[^"]|"tool_calls"\s*:\s*\[\s*\{|"token_ids"\s*:\s*\[\s*\d'
)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_DONE = b"[DONE]"


class StreamWatch:
    """Fed with the reads of one response; knows when content came, the last usage, an error event, and the end."""

    __slots__ = ("_kept", "_rest", "_usage", "done", "error", "error_is_object", "events", "first_event", "read_times")

    def __init__(self, *, keeps_text: bool = False) -> None:
        self._rest = b""
        self._kept: list[bytes] | None = [] if keeps_text else None
        self._usage: bytes | None = None
        self.read_times: list[float] = []
        self.first_event: float | None = None
        self.events = 0
        self.done = False
        self.error: str | None = None
        self.error_is_object = False

    @property
    def first_content(self) -> float | None:
        """When the first content came; for a stream that had none, its first event but an error."""
        return self.read_times[0] if self.read_times else self.first_event

    def feed(self, data: bytes, now: float) -> None:
        """Takes one read that arrived at `now`; events may be cut anywhere."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *whole, self._rest = data.split(b"\n\n")
        before = self.events
        for event in whole:
            self._event(event, now)
        if self.events > before:
            self.read_times.append(now)

    def finish(self) -> None:
        """The body ended: a last [DONE] counts even where the blank line after it is missing."""
        if self._rest.strip() == b"data: " + _DONE:
            self.done = True

    def usage(self) -> dict[str, Any]:
        """The last usage the server reported; empty where there was none."""
        if self._usage is None:
            return {}
        usage = _parsed(self._usage).get("usage")
        return usage if isinstance(usage, dict) else {}

    def text(self) -> str:
        """What the answer said; parsed now, and empty if it was not to be kept."""
        return "".join(text_of(_parsed(data)) for data in self._kept or ())

    def _event(self, event: bytes, now: float) -> None:
        data = _data(event)
        if not data:
            return
        if data == _DONE:
            self.done = True
            return
        if b'"error"' in data and self.error is None:
            told = _parsed(data)
            self.error, self.error_is_object = error_message(told), is_error_object(told)
        if self.first_event is None and self.error is None:
            self.first_event = now
        if _CONTENT.search(data):
            self.events += 1
            if self._kept is not None:
                self._kept.append(data)
        if _USAGE.search(data):
            self._usage = data


def text_of(answer: dict[str, Any]) -> str:
    """The text of the first choice of an answer or of an event of one."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return ""
    message = choice.get("delta") or choice.get("message") or {}
    text = choice.get("text") or (message.get("content") if isinstance(message, dict) else None)
    return text if isinstance(text, str) else ""


def error_message(answer: dict[str, Any]) -> str | None:
    """The message of an OpenAI-shaped error body or event; None where it holds no error."""
    error = answer.get("error")
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)


def is_error_object(answer: dict[str, Any]) -> bool:
    """Whether it is an error as OpenAI's clients read it: an object with a message."""
    error = answer.get("error")
    return isinstance(error, dict) and isinstance(error.get("message"), str)


def _data(event: bytes) -> bytes:
    """The data of an event; comments (keep-alives) and other fields have none."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}
