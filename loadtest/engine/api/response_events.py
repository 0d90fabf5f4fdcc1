"""The named, numbered events of a streamed response."""

from collections.abc import Sequence
from typing import Any

import orjson

from loadtest.engine.api.response_object import message_item, response_object, text_part
from loadtest.engine.choice import Choice


class ResponseEvents:
    """Renders the events; `final` is the complete response once the stream has closed."""

    def __init__(
        self, body: dict[str, Any], response_id: str, message_id: str, model: str, created: int, choice: Choice
    ) -> None:
        self._fields = (body, response_id, message_id, model, created, choice)
        self._message_id = message_id
        self._choice = choice
        self._number = -1
        self.final: dict[str, Any] = {}

    def opening(self) -> Sequence[bytes]:
        """The response, its message and the message's text begin."""
        begun = response_object(*self._fields, None)
        item = {"item": message_item(self._message_id, None), "output_index": 0}
        part = {**self._place(), "part": text_part("", [])}
        return (
            self._event("response.created", {"response": begun}),
            self._event("response.in_progress", {"response": begun}),
            self._event("response.output_item.added", item),
            self._event("response.content_part.added", part),
        )

    def tokens(self, choice: Choice, start: int, stop: int, last: bool) -> Sequence[bytes]:
        """The text of the new tokens; after the last one, the whole text again."""
        events = []
        text = choice.text(start, stop)
        if text:
            events.append(self._event("response.output_text.delta", {**self._place(), "delta": text, "logprobs": []}))
        if last:
            whole = choice.text(0, stop)
            events.append(self._event("response.output_text.done", {**self._place(), "logprobs": [], "text": whole}))
            events.append(self._event("response.content_part.done", {**self._place(), "part": text_part(whole)}))
            item = {"item": message_item(self._message_id, whole), "output_index": 0}
            events.append(self._event("response.output_item.done", item))
        return events

    def closing(self) -> Sequence[bytes]:
        """Nothing goes between the text and the final marker."""
        return ()

    def done(self) -> Sequence[bytes]:
        self.final = response_object(*self._fields, self._choice.sequence.output_tokens)
        return (self._event("response.completed", {"response": self.final}),)

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._message_id, "output_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        ordered = dict(sorted({**fields, "sequence_number": self._number, "type": name}.items()))
        return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(ordered))
