"""A backend's refusals with the codes that clients act on: to compact a conversation, or to send it whole again.

vLLM's code is the HTTP status. Its message stays; Anthropic's clients know a long prompt by the beginning of it.
"""

import re
from typing import Any, Final

import orjson

from gateway.core.errors import PreviousResponseNotFound
from gateway.core.request import InferenceRequest

_TOO_LONG: Final = b"maximum context length"
_MOST: Final = re.compile(r"maximum context length (?:is |\()(\d+)")
_GIVEN: Final = re.compile(r"(\d+) input tokens|Input length \((\d+)\)")
_MOST_BYTES: Final = 65536
_ANTHROPIC: Final = frozenset(("messages", "count_tokens"))


def as_clients_read(status: int, body: bytes, request: InferenceRequest) -> tuple[int, bytes]:
    """The status and the body for the client."""
    is_too_long = status == 400 and _TOO_LONG in body
    if not (is_too_long or status == 404) or len(body) > _MOST_BYTES:
        return status, body
    try:
        document: Any = orjson.loads(body)
        error = document["error"]
        message = error["message"]
        if is_too_long and request.endpoint in _ANTHROPIC:
            error |= {"type": "invalid_request_error", "message": _prompt_is_too_long(message)}
        elif is_too_long:
            error["code"] = "context_length_exceeded"
        elif request.demand.pinned is not None and request.body and message.endswith("not found."):
            missing = PreviousResponseNotFound
            error |= {"param": "previous_response_id", "code": missing.code, "message": f"Previous r{message[1:]}"}
            status = missing.status
        else:
            return status, body
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return status, body
    return status, orjson.dumps(document)


def _prompt_is_too_long(message: str) -> str:
    most, given = _MOST.search(message), _GIVEN.search(message)
    if most is None or given is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {given[1] or given[2]} tokens > {most[1]} maximum. {message}"
