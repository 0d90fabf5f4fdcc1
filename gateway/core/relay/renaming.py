"""The model's name in answers: clients that use an alias read the alias.

Only the name's own place is changed, not the same text elsewhere: in generated text, quotes are escaped, and other
objects (arguments of tools, metadata, schemas) are deeper. In streams of OpenAI's completions, each event has the name
in the same bytes, which are found once and then replaced.
"""

import re
from typing import Final

import orjson

from gateway.core.relay.sse import EventStream

_KEY: Final = b'"model"'
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# The name with its key; another string; a bracket; or the start of an incomplete string.
_TOKEN = re.compile(rb'("model"[ \t\r\n]*:[ \t\r\n]*%b)|%b|[{}\[\]]|"' % (_STRING, _STRING), re.DOTALL)
_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+("?)', re.DOTALL)
_NO_NAME = re.compile(
    rb"[ \t\r\n]*(?:[^ \t\r\n:]|:[ \t\r\n]*[^ \t\r\n\"])"
)  # the bytes after a string that is no such key
_MOST_HELD_BYTES = 8192  # longer strings are no names
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")
_QUOTE: Final = ord('"')
_EVENT_END = re.compile(rb"(\n\r?\n)")


class NameReplacer:
    """Replaces the first name of a model at one depth of a JSON text, which arrives in pieces.

    `name` is the new one. `depth` is 1 in the outermost object. `found` is the replaced name.
    """

    def __init__(self, name: str, depth: int = 1) -> None:
        self.found = b""
        self._name = orjson.dumps(name)
        self._wanted = depth
        self._depth = 0
        self._held = b""
        self._within = False  # a long string, with its beginning already passed on

    def feed(self, data: bytes) -> bytes:
        """The bytes to pass on now. The end of a piece may be kept until the next one, or `rest`."""
        if self.found:
            return data
        data, at = self._held + data, 0
        self._held = b""
        if self._within:
            rest = _REST.match(data)
            assert rest is not None
            at = rest.end()
            if not rest[1]:
                return self._up_to(data, at)
            self._within = False
        for match in _TOKEN.finditer(data, at):
            start, end = match.span()
            mark = data[start]
            if mark in _OPENING:
                self._depth += 1
            elif mark in _CLOSING:
                self._depth -= 1
            elif match[1] is not None and self._depth == self._wanted:
                self.found = match[1]
                return b"%b%b:%b%b" % (data[:start], _KEY, self._name, data[end:])
            elif end == start + 1:
                self._within = len(data) - start > _MOST_HELD_BYTES
                return self._up_to(data, start if not self._within else self._before_escape(data, end))
            elif match[1] is None and data[start:end] == _KEY and self._may_be_named(data, end):
                return self._up_to(data, start)
        return data

    def rest(self) -> bytes:
        """The kept bytes when the text has ended."""
        held, self._held = self._held, b""
        return held

    def _up_to(self, data: bytes, end: int) -> bytes:
        self._held = data[end:]
        return data[:end]

    def _may_be_named(self, data: bytes, end: int) -> bool:
        """Whether a value may follow that has not come as a whole."""
        return len(data) - end <= _MOST_HELD_BYTES and _NO_NAME.match(data, end) is None

    def _before_escape(self, data: bytes, start: int) -> int:
        """The end of the complete part of the string that starts here: a backslash belongs to the next character."""
        rest = _REST.match(data, start)
        assert rest is not None
        return rest.end()


class RenamedEvents(EventStream):
    """An event stream with the alias as the model of its events. `nested`: it is in an object of the event."""

    def __init__(self, done_marker: bytes | None, hides_usage: bool, alias: str, *, nested: bool) -> None:
        super().__init__(done_marker, hides_usage)
        self._name = alias
        self._new = b"%b:%b" % (_KEY, orjson.dumps(alias))
        self._old = b""  # the key and the name, as every event has them
        self._nested = nested
        self._replacer: NameReplacer | None = None  # of an incomplete event

    def take(self, data: bytes) -> bytes:
        data = super().take(data)
        if self._old and (self._within or data.find(self._old) >= 0):
            return data.replace(self._old, self._new)
        if self._replacer is None and not self._within and data.find(_KEY) < 0:
            return data
        return b"".join(map(self._renamed, _EVENT_END.split(data)))

    def _renamed(self, event: bytes) -> bytes:
        """One event or its end; or a part, if the event is too long to be kept."""
        replacer = self._replacer
        if _EVENT_END.fullmatch(event):
            self._replacer = None
            return event if replacer is None else replacer.rest() + event
        if replacer is None:
            replacer = self._replacer = NameReplacer(self._name, 2 if self._nested else 1)
        event = replacer.feed(event)
        if replacer.found and not self._nested:
            self._old = replacer.found
        return event
