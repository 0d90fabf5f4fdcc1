"""Errors in vLLM's shapes."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson

_BUSY: Final = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
_ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class ApiError(Exception):
    """An answer other than 200; `body` replaces the OpenAI-like error object where vLLM does so."""

    def __init__(
        self,
        status: int,
        message: str = "",
        error_type: str = "BadRequestError",
        *,
        param: str | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.headers = dict(headers or {})
        self._body = body

    def body(self) -> Any:
        """The JSON value of the answer."""
        if self._body is not None:
            return self._body
        return {"error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.status}}

    def anthropic_body(self) -> Any:
        """The JSON value of the answer under /v1/messages."""
        return {"type": "error", "error": {"type": self.error_type, "message": self.message}}

    def event(self) -> bytes:
        """The server-sent event that ends a stream with this error."""
        error = self.body()["error"]
        # vLLM writes this one object with the spaces of json.dumps.
        fields = ", ".join(f'"{key}": {orjson.dumps(value).decode()}' for key, value in error.items())
        return f'data: {{"error": {{{fields}}}}}\n\n'.encode()


def bad_request(message: str, param: str | None = None, value: object = None) -> ApiError:
    """A request that vLLM refuses after parsing it; a parameter (and its value) is named at the message's end."""
    if param is not None:
        shown = f", value={value}" if value is not None else ""
        message = f"{message} (parameter={param}{shown})"
    return ApiError(400, message, "BadRequestError", param=param)


def invalid(location: str, kind: str, message: str, value: object) -> ApiError:
    """A request that fails the validation of its fields."""
    shown: object = value
    if isinstance(value, list | tuple):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    elif isinstance(value, dict):
        shown = f"<dict of {len(value)} items>"
    elif value is not None and not isinstance(value, str):
        shown = str(value)
    elif value is None:
        shown = "None"
    detail = {"type": kind, "loc": location, "msg": message, "input": shown}
    return ApiError(400, f"1 validation error:\n  {detail}", HTTPStatus.BAD_REQUEST.phrase, param=location)


def missing(field: str, body: Mapping[str, Any]) -> ApiError:
    return invalid(f"body.{field}", "missing", "Field required", dict(body))


def unknown_model(model: str, served: str, with_aliases: bool = True) -> ApiError:
    """The request names a model that is not served; the pooling endpoints name no aliases and no parameter."""
    aliases = f" Valid aliases: {served}." if with_aliases else ""
    return ApiError(
        404, f"The model `{model}` does not exist.{aliases}", "NotFoundError", param="model" if with_aliases else None
    )


def too_long(prompt_tokens: int, max_model_len: int) -> ApiError:
    """The prompt exceeds the context. vLLM stops counting one token past it."""
    counted = max_model_len + 1 if prompt_tokens > max_model_len else prompt_tokens
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
        f"{counted} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "input_tokens",
        counted,
    )


def not_found() -> ApiError:
    return ApiError(404, body={"detail": "Not Found"})


def method_not_allowed(allowed: str) -> ApiError:
    """The route exists for other methods."""
    return ApiError(405, body={"detail": "Method Not Allowed"}, headers={"Allow": allowed})


def unauthorised() -> ApiError:
    """The API key is missing or wrong."""
    return ApiError(401, body={"error": "Unauthorized"})


def queue_full() -> ApiError:
    """Admission is refused: too many requests are queued."""
    return ApiError(503, _BUSY, HTTPStatus.SERVICE_UNAVAILABLE.phrase)


def rank_out_of_range(rank: int, size: int) -> ApiError:
    """The request wants a data-parallel rank that does not exist."""
    return ApiError(400, f"data_parallel_rank {rank} is out of range [0, {size}).")


def engine_dead() -> ApiError:
    return ApiError(500, _ENGINE_DEAD, "InternalServerError")
