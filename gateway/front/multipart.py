"""Finding the model in an audio upload without reading the upload."""

import re

from gateway.errors import InvalidRequest
from gateway.front.upload import Upload

_LOOK_BYTES = 1048576
# Every repetition is bounded, and tried once a line, so that no upload can make the search slow.
_MODEL = re.compile(
    rb'\ncontent-disposition:[^\r\n]{0,256}?\bname="?model"?[ \t]*(?:;[^\r\n]{0,256})?\r\n'
    rb"(?:[^\r\n]{1,1024}\r\n){0,8}\r\n([^\r\n]{1,512})\r\n",
    re.IGNORECASE,
)


async def model_of(upload: Upload, only_model: str | None) -> str:
    """The form field `model`. What was read to find it is put back. Raises InvalidRequest."""
    pieces: list[bytes] = []
    size = looked_at = 0
    found = None
    async for piece in upload:
        pieces.append(piece)
        size += len(piece)
        if size >= 2 * looked_at:  # pieces may be of one byte: each byte is looked at twice, not thousands of times
            looked_at = size
            found = _MODEL.search(b"".join(pieces))
        if found or size > _LOOK_BYTES:
            break
    found = found or _MODEL.search(b"".join(pieces))
    upload.put_back(pieces)
    if found:
        return found[1].decode("utf-8", "replace")
    if only_model is not None:
        return only_model
    raise InvalidRequest(
        f"The form field `model` was not found in the first {_LOOK_BYTES} bytes: put it before the file.", param="model"
    )
