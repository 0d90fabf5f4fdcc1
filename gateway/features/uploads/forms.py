"""A multipart form, parsed while it arrives: short fields are kept, the content of the file is passed on.

vLLM's server uses the same parser. Forms that parsers of other versions could read differently are refused, including
duplicate fields, of which a backend takes the last.
"""

import logging
import re
from typing import Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.core.errors import InvalidRequest

_BOUNDARY: Final = re.compile(rb"[A-Za-z0-9'()+_,./:=? -]{0,127}[A-Za-z0-9'()+_,./:=?-]")
_TOKEN: Final = re.compile(rb"[A-Za-z0-9'+_.-]+")
_NAMES: Final = re.compile(rb"(?<![a-z0-9_-])name[\s*0-9]*=", re.IGNORECASE)  # also in a quoted filename
_DISPOSITION: Final = b"content-disposition"
_PARTS = 128
_HEADERS = 8
_HEADER_BYTES = 4096
_FIELD_BYTES = 4096
_NAME_LENGTH = 255


def boundary_of(content_type: bytes) -> bytes:
    """Raises InvalidRequest if this is not a multipart form. Case and other parameters do not matter."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("Content-Type must be multipart/form-data with a boundary.")
    return boundary


def content_type_of(boundary: bytes) -> bytes:
    """The type that a backend gets: without a charset, which would change the names of fields."""
    return b"multipart/form-data; boundary=" + (boundary if _TOKEN.fullmatch(boundary) else b'"%b"' % boundary)


class Form:
    """The parsed part of a form. `fields` has the complete fields of `acted_on`; others are not kept.

    `spans`: the places of their values in the form, from their beginning; end -1 = not complete. `filename`: of the
    part `file`, once it has begun.
    """

    def __init__(self, acted_on: frozenset[str]) -> None:
        self.fields: dict[str, str] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.filename: str | None = None
        self.is_complete = False
        self.parsed_bytes = 0
        self._acted_on = acted_on
        self._parts = 0
        self._header = b""
        self._header_value = b""
        self._disposition: bytes | None = None
        self._field = ""  # of `acted_on`, with a value to read
        self._value = b""
        self._in_file = False
        self._content: list[bytes] = []

    def callbacks(self) -> Any:
        """The parser's callbacks: they refer to the form, and the form not to them, as a cycle would keep both."""
        return {
            "on_part_begin": self._on_part,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def parsed(self, size_bytes: int) -> list[bytes]:
        """Note parsed bytes; returns their part of the file."""
        self.parsed_bytes += size_bytes
        content, self._content = self._content, []
        return content

    def check_end(self) -> None:
        """The body has ended. Raises InvalidRequest if the form has not."""
        if not self.is_complete:
            raise InvalidRequest("Malformed multipart form: its last boundary is missing.")

    # Called by the parser.

    def _on_part(self) -> None:
        self._parts += 1
        if self._parts > _PARTS:
            raise InvalidRequest(f"The form exceeds the limit of {_PARTS} fields.")
        self._disposition = None

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == _DISPOSITION:
            if self._disposition is not None:
                raise InvalidRequest("Malformed multipart form: a part has two Content-Disposition headers.")
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def _on_headers(self) -> None:
        disposition = self._disposition or b""
        kind, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name or len(_NAMES.findall(disposition)) != 1:
            raise InvalidRequest("Malformed multipart form: a part must have one name.")
        filename = options.get(b"filename")
        if name == "file":
            if self.filename is not None:
                raise InvalidRequest("The form has two files; upload one file per request.", param="file")
            shown = (filename or b"").decode("utf-8", "replace")
            self.filename = "".join(filter(str.isprintable, shown))[:_NAME_LENGTH] or "upload"
            self._in_file = True
        elif name in self._acted_on:
            if name in self.fields:
                raise InvalidRequest(f"Duplicate form field {name!r}.", param=name)
            if filename is not None:
                raise InvalidRequest(f"The form field {name!r} must not be a file.", param=name)
            self._field = name

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._content.append(data[start:end])
        elif self._field:
            if not self._value:
                self.spans[self._field] = (self.parsed_bytes + start, -1)
            self._value += data[start:end]
            if len(self._value) > _FIELD_BYTES:
                raise InvalidRequest(f"The form field {self._field!r} exceeds {_FIELD_BYTES} bytes.", param=self._field)

    def _on_part_end(self) -> None:
        name, value = self._field, self._value
        self._field, self._value, self._in_file = "", b"", False
        if name:
            try:
                text = value.decode()
            except UnicodeDecodeError:
                text = "\0"
            if not text.isprintable():  # its place is known then: no piece of it looks like a boundary
                raise InvalidRequest(f"The form field {name!r} must be one line of UTF-8.", param=name)
            self.fields[name] = text
            if value:
                start = self.spans[name][0]
                self.spans[name] = (start, start + len(value))

    def _on_end(self) -> None:
        self.is_complete = True


class FormParser:
    """Takes the body of a form piece by piece."""

    def __init__(self, boundary: bytes, acted_on: frozenset[str]) -> None:
        self.form = Form(acted_on)
        limits: Any = {"max_header_count": _HEADERS, "max_header_size": _HEADER_BYTES}
        self._parser = MultipartParser(boundary, self.form.callbacks(), **limits)
        self._parser.logger = logging.Logger("form", logging.CRITICAL)  # it would warn of every malformed form

    def feed(self, piece: bytes) -> list[bytes]:
        """Take bytes; returns their part of the file. Raises InvalidRequest."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequest(f"Malformed multipart form: {error}.") from error
        return self.form.parsed(len(piece))
