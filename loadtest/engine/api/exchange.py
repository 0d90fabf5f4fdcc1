"""Reads requests; writes answers and server-sent events, one chunk an event and one write a step."""

import json
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import orjson
from aiohttp import web

from loadtest.engine.api.errors import ApiError, bad_request, invalid
from loadtest.engine.tokens import TokenisedText, from_ids

Body: TypeAlias = dict[str, Any]

# Headers that vLLM's server and its CORS middleware add to every answer.
COMMON_HEADERS: Final = MappingProxyType({"Server": "uvicorn", "Vary": "Origin"})


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(value),
        status=status,
        headers={**COMMON_HEADERS, **(headers or {})},
        content_type="application/json",
    )


def empty_answer(status: int = 200) -> web.Response:
    return web.Response(status=status, headers=COMMON_HEADERS)


def error_answer(error: ApiError, path: str) -> web.Response:
    """The answer that an error makes."""
    value = error.anthropic_body() if path.startswith("/v1/messages") and error.status != 401 else error.body()
    response = json_answer(value, error.status, error.headers)
    if error.status == 401:
        # The key is checked before the middleware that adds this header.
        del response.headers["Vary"]
    return response


async def read_json(request: web.BaseRequest) -> Body:
    if request.content_type != "application/json":
        raise ApiError(
            400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request"
        )
    raw = await request.read()
    if not raw:
        raise invalid("body", "missing", "Field required", None)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = _read_leniently(raw)
    if not isinstance(body, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("body", "model_attributes_type", text, body)
    return body


def _read_leniently(raw: bytes) -> Any:
    """The value, including extensions of Python's parser (NaN, lone surrogates), or the error in vLLM's words."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as problem:
        detail = {
            "type": "json_invalid",
            "loc": f"body.{problem.pos}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": problem.msg},
        }
        raise ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", param=f"body.{problem.pos}") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    raise invalid("body.messages", "string_type", "Input should be a valid string", content)


def read_messages(body: Body) -> list[tuple[str, str]]:
    """The (role, text) pairs of a chat."""
    messages = body.get("messages")
    if messages is None:
        raise invalid("body.messages", "missing", "Field required", body)
    if not isinstance(messages, list):
        raise invalid("body.messages", "list_type", "Input should be a valid list", messages)
    if not messages:
        raise ApiError(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    pairs = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"body.messages.{number}.role", "missing", "Field required", message)
        pairs.append((message["role"], text_of(message.get("content"))))
    return pairs


def read_token_ids(value: list[Any], vocabulary: int = 2**32) -> list[int]:
    """A prompt given as token ids."""
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool):
            raise invalid("body.prompt", "int_type", "Input should be a valid integer", token)
        if not 0 <= token < vocabulary:
            raise bad_request(f"Token id {token} is out of vocabulary")
    return value


def tokens_and_text(ids: list[Any]) -> tuple[TokenisedText, str]:
    tokens = from_ids(read_token_ids(ids))
    return tokens, tokens.text()


# Where uvicorn makes the application wait for the client.
_HIGH_WATER_BYTES: Final = 64 * 1024


class EventStream:
    """The body of a streamed response."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        content_type = {"Content-Type": "text/event-stream; charset=utf-8"}
        self._response = web.StreamResponse(headers={**COMMON_HEADERS, **content_type, **headers})
        self._request: web.BaseRequest | None = None

    async def open(self, request: web.BaseRequest) -> web.StreamResponse:
        self._response.enable_chunked_encoding()
        await self._response.prepare(request)
        self._request = request
        return self._response

    @property
    def response(self) -> web.StreamResponse:
        """The response that carries the events."""
        return self._response

    @property
    def congested(self) -> bool:
        """Whether the client reads too slowly: output should wait and be merged."""
        transport = self._request.transport if self._request else None
        return transport is None or transport.get_write_buffer_size() > _HIGH_WATER_BYTES

    def write(self, *events: bytes) -> None:
        """Send events, each as a chunk of its own. Nothing is sent to a client that has gone."""
        transport = self._request.transport if self._request else None
        if transport is not None and not transport.is_closing():
            transport.write(b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events]))

    async def drained(self) -> None:
        """Wait until the client has read the sent output."""
        if self._request is not None:
            await self._request.writer.drain()

    async def close(self) -> None:
        await self._response.write_eof()

    def break_off(self, by: str) -> None:
        """End the connection in the middle of the body."""
        if self._request is not None:
            break_connection(self._request, by)


def break_connection(request: web.BaseRequest, by: str) -> None:
    """Close a connection from this side, by FIN or by RST."""
    transport = request.transport
    if transport is None:
        return
    if by == "rst":
        peer: socket.socket | None = transport.get_extra_info("socket")
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()
