"""Files and batches of a gateway with several workers, where no database shares them: the first worker keeps all of
them and runs their lines; the others pass requests for them on to it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Final

import aiohttp
from yarl import URL

from gateway.core.core import Core
from gateway.core.errors import WorkerUnreachable
from gateway.core.front.body import Upload
from gateway.core.front.handler import LocalApi
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import ClientResponse
from gateway.core.front.routes import Route
from gateway.feature import Feature
from gateway.features.batches.routes import BATCH_ROUTES

_CONNECT_SECONDS: Final = 2.0
_PIECE_BYTES: Final = 65536
_PASSED_ON: Final = ("content-disposition", "retry-after", "retry-after-ms", "x-should-retry")
_OF_THE_CONNECTION: Final = (b"connection", b"expect", b"host", b"transfer-encoding", b"x-request-id")


class ForwardedBatches:
    """The API of files and batches of another worker, at the path of its socket."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def answer(self, incoming: HttpRequest, _: tuple[str, str], reply: ClientResponse) -> None:
        """Answer through `reply` as that worker does, which finds the owner itself. Raises WorkerUnreachable."""
        connector = aiohttp.UnixConnector(self._path, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in incoming.headers.items()
            if name not in _OF_THE_CONNECTION
        }
        headers["x-request-id"] = reply.request_id
        body = incoming.body or None if incoming.upload is None else _pieces(incoming.upload)
        url = URL(f"http://worker{incoming.path.decode('ascii', 'replace')}", encoded=True)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session,
                session.request(
                    incoming.method.decode("ascii"), url, headers=headers, data=body, allow_redirects=False,
                    skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
                ) as answer,
            ):  # fmt: skip
                await self._pass_on(answer, reply)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerUnreachable(
                "The worker that keeps files and batches does not answer. Retry in a second.", retry_after_seconds=1.0
            ) from error

    async def _pass_on(self, answer: aiohttp.ClientResponse, reply: ClientResponse) -> None:
        content_type = answer.headers.get("content-type", "application/json").encode("latin-1")
        extra = b"".join(
            f"{name}: {answer.headers[name]}\r\n".encode("latin-1") for name in _PASSED_ON if name in answer.headers
        )
        if answer.status != HTTPStatus.OK or content_type.startswith(b"application/json"):
            reply.send(answer.status, content_type, extra, await answer.read())
            return
        writable = asyncio.Event()
        reply.begin(answer.status, content_type, extra)
        reply.when_writable(writable.set)
        try:
            async for data in answer.content.iter_chunked(_PIECE_BYTES):
                writable.clear()
                if reply.write(data) and reply.blocked:
                    await writable.wait()
        finally:
            reply.when_writable(None)
        reply.end()


async def _pieces(upload: Upload) -> AsyncIterator[bytes]:
    async for piece in upload:
        yield bytes(piece)


class ForwardedFeature(Feature):
    """Files and batches, in a worker that does not keep them."""

    def __init__(self, path: str, _: Core) -> None:
        self._batches = ForwardedBatches(path)

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        return BATCH_ROUTES

    def apis(self) -> Mapping[str, LocalApi]:
        return {"batches": self._batches}
