"""A multipart form, parsed while it arrives: short fields are kept, the content of the file is passed on."""

import re
from enum import Enum, auto

from gateway.errors import InvalidRequest

_TYPE = re.compile(
    rb'multipart/form-data;.*?\bboundary="?([A-Za-z0-9\'()+_,./:=? -]{0,69}[A-Za-z0-9\'()+_,./:=?-])"?\s*(?:;.*)?'
)
_PARAMETER = re.compile(rb';\s*(name|filename)=(?:"((?:[^"\\\r\n]|\\.)*)"|([^;"\s]+))', re.IGNORECASE)
_HEAD_BYTES = 8192
_FIELD_BYTES = 4096
_PARTS = 32
_NAME_LENGTH = 255


class _State(Enum):
    DELIMITER = auto()  # what follows a delimiter: the end of the line, or of the form
    HEAD = auto()
    FIELD = auto()
    FILE = auto()
    END = auto()


def boundary_of(content_type: bytes) -> bytes:
    """Raises InvalidRequest if this is not a multipart form."""
    found = _TYPE.fullmatch(content_type)
    if found is None:
        raise InvalidRequest("Content-Type must be multipart/form-data with a boundary.")
    return found[1]


class FormParser:
    """Takes the body piece by piece. `fields` and `filename` are known once their parts have come."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first delimiter has no line before it
        self._state = _State.FIELD  # what precedes the first delimiter is dropped
        self._field = ""  # the name of the field that is read; empty = dropped
        self._value = bytearray()
        self._parts = 0

    @property
    def is_complete(self) -> bool:
        return self._state is _State.END

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; returns what they have of the file. Raises InvalidRequest."""
        self._buffer += data
        content: list[bytes] = []
        while self._step(content):
            pass
        return content

    def _step(self, content: list[bytes]) -> bool:
        """Take what is complete in the buffer; false = more must come."""
        buffer = self._buffer
        if self._state is _State.DELIMITER:
            if len(buffer) < 2:
                return False
            ends, is_last = bytes(buffer[:2]), buffer[:2] == b"--"
            if not is_last and ends != b"\r\n":
                raise InvalidRequest("Malformed multipart form: a boundary is followed by other text.")
            self._state = _State.END if is_last else _State.HEAD
            if not is_last:
                del buffer[:2]
            return not is_last
        if self._state is _State.HEAD:
            end = buffer.find(b"\r\n\r\n")
            if end < 0 and len(buffer) <= _HEAD_BYTES:
                return False
            if not 0 <= end <= _HEAD_BYTES:
                raise InvalidRequest(f"Malformed multipart form: the head of a part exceeds {_HEAD_BYTES} bytes.")
            self._begin_part(bytes(buffer[:end]))
            del buffer[: end + 4]
            return True
        if self._state is _State.END:
            buffer.clear()
            return False
        return self._take_content(content)

    def _take_content(self, content: list[bytes]) -> bool:
        buffer, delimiter = self._buffer, self._delimiter
        end = buffer.find(delimiter)
        taken = end if end >= 0 else len(buffer) - len(delimiter) + 1
        if taken > 0:
            piece = bytes(buffer[:taken])
            if self._state is _State.FILE:
                content.append(piece)
            elif self._field:
                self._value += piece
                if len(self._value) > _FIELD_BYTES:
                    raise InvalidRequest(f"The form field {self._field!r} exceeds {_FIELD_BYTES} bytes.")
            del buffer[:taken]
        if end < 0:
            return False
        if self._field:
            self.fields[self._field] = self._value.decode("utf-8", "replace")
        self._field = ""
        del buffer[: len(delimiter)]
        self._state = _State.DELIMITER
        return True

    def _begin_part(self, head: bytes) -> None:
        self._parts += 1
        if self._parts > _PARTS:
            raise InvalidRequest(f"The form exceeds the limit of {_PARTS} fields.")
        found: dict[bytes, bytes] = {}
        for line in head.split(b"\r\n"):
            header, _, value = line.partition(b":")
            if header.strip().lower() == b"content-disposition":
                found = {each[0].lower(): each[1] or each[2] for each in _PARAMETER.findall(value)}
        name = found.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise InvalidRequest("Malformed multipart form: a part has no name.")
        self._value.clear()
        if name == "file":
            if self.filename is not None:
                raise InvalidRequest("The form has two files; upload one file per request.", param="file")
            shown = found.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = "".join(filter(str.isprintable, shown))[:_NAME_LENGTH] or "upload"
            self._state = _State.FILE
            return
        if name in self.fields:
            raise InvalidRequest(f"Duplicate form field {name[:64]!r}.", param=name[:64])
        self._field = name
        self._state = _State.FIELD
