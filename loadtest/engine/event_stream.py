"""Server-sent events, written straight to the connection: one chunk an event, one write a step."""

import socket
import struct
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from loadtest.engine.api.exchange import COMMON_HEADERS

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
        """Whether the client reads too slowly: what is to be sent should wait and be merged."""
        transport = self._request.transport if self._request else None
        return transport is None or transport.get_write_buffer_size() > _HIGH_WATER_BYTES

    def write(self, *events: bytes) -> None:
        """Send events, each as a chunk of its own. Nothing is sent to a client that has gone."""
        transport = self._request.transport if self._request else None
        if transport is not None and not transport.is_closing():
            transport.write(b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in events]))

    async def drained(self) -> None:
        """Wait until the client has read what was sent."""
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
