"""Finding the model in an audio upload without reading the upload."""

import re

from gateway.errors import InvalidRequest
from gateway.front.upload import Upload

_LOOK_BYTES = 1048576
_MODEL = re.compile(
    rb'content-disposition:[^\r\n]*\bname="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,512})\r\n', re.IGNORECASE
)


async def model_of(upload: Upload, only_model: str | None) -> str:
    """The form field `model`. What was read to find it is put back. Raises InvalidRequest."""
    pieces: list[bytes] = []
    size = 0
    found = None
    async for piece in upload:
        pieces.append(piece)
        size += len(piece)
        found = _MODEL.search(b"".join(pieces))
        if found or size > _LOOK_BYTES:
            break
    upload.put_back(pieces)
    if found:
        return found[1].decode("utf-8", "replace")
    if only_model is not None:
        return only_model
    raise InvalidRequest(
        f"The form field `model` was not found in the first {_LOOK_BYTES} bytes: put it before the file.", param="model"
    )
