"""What clients send besides contents: the fields of a new batch, of an upload, and of a page of a list."""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictStr, ValidationError
from pydantic_core import PydanticCustomError

from gateway.core.errors import InvalidRequest

_WINDOW = re.compile(r"([1-9][0-9]{0,4})([hm])")
_MOST_WINDOW_SECONDS = 30 * 86400
_MOST_PAIRS, _MOST_NAME, _MOST_VALUE = 16, 64, 512  # of metadata
Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"
]
Document = TypeVar("Document", bound=BaseModel)


def window_seconds(window: str) -> int:
    """The length of a completion window; 0 = it is not valid."""
    found = _WINDOW.fullmatch(window)
    seconds = 0 if found is None else int(found[1]) * (3600 if found[2] == "h" else 60)
    return seconds if seconds <= _MOST_WINDOW_SECONDS else 0


def _checked_window(window: str) -> str:
    if not window_seconds(window):
        raise PydanticCustomError(
            "window", "must be 24h, or another number of hours or minutes, such as 2h or 30m; at most 720h"
        )
    return window


def _whole(value: Any) -> int:
    """Forms and queries have digits; no other spelling of a number is one."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if type(value) is not int:
        raise PydanticCustomError("whole_number", "must be a whole number")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]


class Expiry(BaseModel):
    """A lifetime that a client sets."""

    anchor: Literal["created_at"]
    seconds: Whole = Field(ge=3600, le=2592000)


class NewBatch(BaseModel):
    """A batch that is to be created."""

    endpoint: Endpoint
    completion_window: Annotated[StrictStr, AfterValidator(_checked_window)]
    input_file_id: StrictStr
    metadata: (
        dict[Annotated[str, Field(max_length=_MOST_NAME)], Annotated[StrictStr, Field(max_length=_MOST_VALUE)]] | None
    ) = Field(None, max_length=_MOST_PAIRS)
    output_expires_after: Expiry | None = None


class UploadFields(BaseModel):
    """The form of an upload, besides the file."""

    purpose: Literal["batch"]
    expires_after: Expiry | None = None


class BatchesPage(BaseModel):
    """A page of a list of batches."""

    after: str | None = None
    limit: Whole = Field(20, ge=1, le=100)


class FilesPage(BaseModel):
    """A page of a list of files."""

    after: str | None = None
    limit: Whole = Field(10000, ge=1, le=10000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def checked(kind: type[Document], fields: dict[str, Any]) -> Document:
    """The fields as a document of this kind. Raises InvalidRequest, which names the first field that is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as invalid:
        wrong = invalid.errors(include_url=False, include_input=False, include_context=False)[0]
        where, reason = ".".join(map(str, wrong["loc"])), wrong["msg"]
    raise InvalidRequest(f"{where}: {reason}."[:500], param=where.partition(".")[0])
