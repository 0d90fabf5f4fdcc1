"""Requests of the dashboard's playground: the admin port passes them to the client port, as any client would send them.

So keys, limits, aliases and logs apply as usual, and the browser needs no permission of the client port (CORS). Only
some paths are passed on, with a JSON body and the key that the operator has typed; nothing of the browser's own headers
is.
"""

import ssl
from collections.abc import Callable
from typing import Final

import aiohttp
from aiohttp import web

from gateway.config import ServerConfig
from gateway.core.errors import InternalError, InvalidRequest, RateLimited
from gateway.features.operate.admin_http import body_of

PATHS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"),
)
_MOST_REQUESTS: Final = 4  # at a time
_CONNECT_SECONDS: Final = 5.0
_KEY_HEADER: Final = "x-playground-key"
_PASSED: Final = (
    *("content-type", "x-request-id", "x-gateway-backend", "x-gateway-queue-ms", "x-gateway-prefix-tokens"),
    *("retry-after",),
)
_LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


class Playground:
    """Passes requests on. `config`: of the client port; `port`: where it listens."""

    def __init__(self, config: Callable[[], ServerConfig], port: Callable[[], int]) -> None:
        self._config = config
        self._port = port
        self._running = 0

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on, and its answer back as it comes. Raises a GatewayError."""
        path = request.query.get("path", "")
        if path not in PATHS:
            raise InvalidRequest(f"The playground sends to {', '.join(PATHS)} only.", param="path")
        if self._running >= _MOST_REQUESTS:
            raise RateLimited(f"{_MOST_REQUESTS} requests of the playground run, which is the limit.")
        body = await body_of(request)
        headers = {"content-type": "application/json"}
        if key := request.headers.get(_KEY_HEADER):
            headers["authorization"] = f"Bearer {key}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        self._running += 1
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
                session.post(self._url(path), data=body, headers=headers, ssl=self._tls()) as answer,
            ):
                return await _passed_on(answer, request)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InternalError(f"The client port did not answer: {type(error).__name__}.") from error
        finally:
            self._running -= 1

    def _url(self, path: str) -> str:
        config = self._config()
        host = _LOOPBACK.get(config.host, config.host)
        scheme = "http" if config.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port()}{path}"

    def _tls(self) -> ssl.SSLContext | bool:
        """A context that trusts the client port's own certificate, and no other."""
        tls = self._config().tls
        if tls is None:
            return True
        if tls.client_ca:
            raise InvalidRequest("The client port needs client certificates: send the request with curl.")
        context = ssl.create_default_context(cafile=tls.certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False  # it connects to an address
        return context


async def _passed_on(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=passed)
    try:
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except ConnectionError:
        pass  # the page was closed: leaving the block aborts the request
    return response
