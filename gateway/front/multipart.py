"""Finding the model in an audio upload without reading the upload."""

from collections.abc import Iterator
from itertools import islice

from gateway.errors import InvalidRequest
from gateway.front.upload import Upload

_LOOK_BYTES = 1048576
_FIELD = b"\ncontent-disposition:"
# No form that a client library writes has longer lines or more of them; so no upload makes the search slow.
_LINE_BYTES = 1024
_HEADERS = 8
_FIELDS = 100
_PART_BYTES = (_HEADERS + 3) * _LINE_BYTES


async def model_of(upload: Upload, only_model: str | None) -> str:
    """The form field `model`. What was read to find it is put back. Raises InvalidRequest."""
    pieces: list[bytes] = []
    size = looked_at = 0
    found = None
    async for piece in upload:
        pieces.append(piece)
        size += len(piece)
        if size >= 2 * looked_at:  # pieces may be of one byte: each byte is looked at twice, not thousands of times
            found = _model_in(b"".join(pieces), max(0, looked_at - _PART_BYTES))
            looked_at = size
        if found or size > _LOOK_BYTES:
            break
    found = found or _model_in(b"".join(pieces), max(0, looked_at - _PART_BYTES))
    upload.put_back(pieces)
    if found:
        return found.decode("utf-8", "replace")
    if only_model is not None:
        return only_model
    raise InvalidRequest(
        f"The form field `model` is missing in the first {_LOOK_BYTES} bytes: send it before the file.", param="model"
    )


def _model_in(data: bytes, start: int) -> bytes | None:
    """The value of the first field of that name, if all of it is there. Headers before `start` are not looked at."""
    lower = data.lower()
    looked, at = 0, lower.find(_FIELD, start)
    while at >= 0 and looked < _FIELDS:
        header = lower[at + 1 : at + 1 + _LINE_BYTES].partition(b"\n")[0]
        if header.endswith(b"\r") and _names_model(header):
            looked += 1
            if value := _value(data, at + 1 + len(header) + 1):
                return value
        at = lower.find(_FIELD, at + 1)
    return None


def _names_model(header: bytes) -> bool:
    """Whether the first parameter `name` of the header, in lower case, is `model`."""
    for parameter in header.rstrip(b"\r").split(b";")[1:]:
        name, _, value = parameter.strip(b" \t").partition(b"=")
        if name == b"name":
            return value in (b"model", b'"model"')
    return False


def _value(data: bytes, start: int) -> bytes | None:
    """The one line after the headers that begin there."""
    for line, after in islice(_lines(data, start), _HEADERS + 1):
        if not line:
            value, _ = next(_lines(data, after), (b"", 0))
            return value
    return None


def _lines(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Lines and where the next one begins, up to a line that is too long or not complete."""
    while (end := data.find(b"\r\n", start, start + _LINE_BYTES)) >= 0:
        yield data[start:end], end + 2
        start = end + 2
