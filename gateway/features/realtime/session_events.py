"""The events of a realtime client, checked while they are passed on: a session keeps the model that it began with.

A message is passed on when it is whole. One that is longer than an event `session.update` is passed on while it
arrives, and must not turn out to be one.
"""

from collections.abc import Callable
from typing import Final

import orjson

from gateway.core.errors import InvalidRequest
from gateway.features.realtime.websocket import FrameHead, masked_text_frame, unmasked

_CONTROL: Final = 8  # opcodes from here on are no part of a message
_RESERVED: Final = 0x70  # bits for extensions; none is offered
_MAX_HEAD_BYTES: Final = 14
_MAX_EVENT_BYTES: Final = 65536
_UPDATE: Final = b"session.update"
_ESCAPE: Final = b"\\u"  # in which a type can be spelled


class SessionEvents:
    """`model`: its name on the backend. `resolve` returns that of a client's name, or raises a GatewayError."""

    def __init__(self, model: str, resolve: Callable[[str], str]) -> None:
        self._model = model
        self._resolve = resolve
        self._rest = b""  # the beginning of a frame's head
        self._head: FrameHead | None = None  # of the frame that arrives
        self._came_bytes = 0  # of its payload
        self._held: list[bytes] = []  # bytes to pass on later, from the beginning of a message
        self._message = b""  # its text; of a long one, the end
        self._is_within = self._is_long = False  # a message that is passed on while it arrives

    def passed(self, data: bytes) -> bytes:
        """The bytes for the backend now. Raises a GatewayError if the session must end."""
        passed: list[bytes] = []
        data, at = self._rest + data, 0
        self._rest = b""
        while at < len(data):
            head = self._head
            if head is None:
                if data[at] & _RESERVED:
                    raise InvalidRequest("WebSocket extensions were not offered: frames must not be compressed.")
                head = FrameHead(data[at : at + _MAX_HEAD_BYTES])
                if not head.size_bytes:
                    self._rest = data[at:]
                    break
                self._head, self._came_bytes = head, 0
                self._is_within = self._is_within or head.opcode < _CONTROL
                self._held.append(data[at : at + head.size_bytes])
                at += head.size_bytes
            part = data[at : at + head.payload_bytes - self._came_bytes]
            self._held.append(part)
            if head.opcode < _CONTROL:
                self._take(unmasked(part, head.mask, self._came_bytes) if head.mask else part)
            at += len(part)
            self._came_bytes += len(part)
            if self._came_bytes == head.payload_bytes:
                self._head = None
                if head.opcode < _CONTROL and head.is_final:
                    self._end(passed)
            if self._is_long or not self._is_within:
                passed += self._held
                self._held.clear()
        return b"".join(passed)

    def _take(self, part: bytes) -> None:
        self._message += part
        if len(self._message) > _MAX_EVENT_BYTES:
            if _UPDATE in self._message or _ESCAPE in self._message:
                raise InvalidRequest(f"An event session.update must not exceed {_MAX_EVENT_BYTES} bytes.")
            self._message = self._message[-len(_UPDATE) :]
            self._is_long = True
        elif self._is_long and (_UPDATE in self._message or _ESCAPE in self._message):
            raise InvalidRequest(f"An event session.update must not exceed {_MAX_EVENT_BYTES} bytes.")

    def _end(self, passed: list[bytes]) -> None:
        """A message is whole. One that names an alias of the model is passed on with the model's name."""
        text, is_long = self._message, self._is_long
        self._message, self._is_within, self._is_long = b"", False, False
        if is_long or not (_UPDATE in text or _ESCAPE in text):
            return
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError as error:  # another parser may read it
            raise InvalidRequest(f"An event is not valid JSON: {error}.") from error
        if type(event) is not dict or event.get("type") != _UPDATE.decode():
            return
        session = event.get("session")
        has_alias = False
        for fields in (event, session) if type(session) is dict else (event,):
            name = fields.get("model")
            if type(name) is str and name != self._model:
                if self._resolve(name) != self._model:
                    raise InvalidRequest(f"This session is for {self._model!r}: open another one for {name[:128]!r}.")
                fields["model"], has_alias = self._model, True
        if has_alias:
            self._held.clear()
            passed.append(masked_text_frame(orjson.dumps(event)))
