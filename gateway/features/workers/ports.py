"""The ports for operators of a gateway with several workers: the parent forwards requests to them.

Workers check the sender, its token and its host name, as they do alone. Reads are answered by the worker in the path
(`/worker/1/admin/queue`), else by the first one; changes go to all. Metrics come from all responding workers. The
gateway lives if all do, and is ready if one is: another may be draining by itself.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol

import aiohttp
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from yarl import URL

from gateway.core.errors import GatewayError, InvalidRequest, WorkerUnreachable
from gateway.core.threads import Threads
from gateway.features.operate.admin_http import (
    MAX_BODY_BYTES,
    OWN_PAGE_MAY_SEND,
    SAFE_METHODS,
    OperatorServer,
    as_answer,
    as_json,
    body_of,
)
from gateway.features.workers.exposition import merged
from gateway.features.workers.place import socket_path

_CONNECT_SECONDS: Final = 2.0
_HEALTH_SECONDS: Final = 5.0
_SCRAPE_SECONDS: Final = 8.0  # Prometheus waits for 10
_CHANGE_SECONDS: Final = 120.0  # a drain waits up to 60 s for its last request
_RESTART: Final = "/admin/restart"
_ONE: Final = re.compile(r"/worker/(\d{1,4})(/.*)")
_HOP_BY_HOP: Final = ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")


class WorkerAnswer(NamedTuple):
    """A whole answer of a worker."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    def response(self) -> web.Response:
        return web.Response(status=self.status, headers=self.headers, body=self.body)

    @property
    def is_pending(self) -> bool:
        """Whether requests are left on the backend that this worker drains."""
        document = (
            orjson.loads(self.body) if self.headers.get("content-type", "").startswith("application/json") else {}
        )
        return isinstance(document, dict) and document.get("drained") is False


class Replaced(NamedTuple):
    """A worker that a new process has taken over; the former one ends its last responses."""

    worker: int
    pid: int
    former_pid: int


class Replaceable(Collector, Protocol):
    """The workers, with metrics of their parent."""

    def serving(self) -> Sequence[int]:
        """The numbers of the serving workers."""

    async def replace(self, number: int) -> Replaced:
        """Replace one by a new process. Raises RestartFailed."""


class WorkersPort:
    """One port for operators. `name`: admin or metrics."""

    def __init__(self, name: str, folder: str, count: int, *, workers: Replaceable) -> None:
        self._name, self._folder, self._count = name, folder, count
        self._workers = workers
        self._threads = Threads("metrics")

    @asynccontextmanager
    async def listening(self, sockets: Iterable[socket.socket]) -> AsyncIterator[int]:
        """Serve at these bound sockets while the block runs; yields the port."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer_errors])
        app.router.add_route("*", "/{path:.*}", self._answer)
        async with OperatorServer(app, sockets, shutdown_seconds=1.0).serving() as port:
            assert port is not None
            yield port

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path
        if found := _ONE.fullmatch(path):
            number = int(found[1])
            if number >= self._count:
                raise InvalidRequest(f"There is no worker {number}: this gateway has {self._count}, from 0.")
            if found[2] == _RESTART:
                return await self._restart(request, [number])
            return await self._passed_on(request, number, found[2])
        if request.path == "/metrics":
            return await self._metrics(request)
        if request.path in ("/livez", "/readyz"):
            return _best(await self._all(request, path, _HEALTH_SECONDS)).response()
        if request.path == _RESTART:
            return await self._restart(request, self._present())
        if request.method in SAFE_METHODS or request.path in OWN_PAGE_MAY_SEND:
            return await self._passed_on(request, self._present()[0], path)
        return _worst(await self._all(request, path, _CHANGE_SECONDS)).response()

    async def _restart(self, request: web.Request, numbers: Sequence[int]) -> web.Response:
        """Replace one worker after the other, up to the first failure; the first one checks the request. Raises
        RestartFailed."""
        body = await body_of(request)
        checked = await self._asked(request, numbers[0], _RESTART, body=body, seconds=_CHANGE_SECONDS)
        if checked.status != HTTPStatus.OK:
            return checked.response()
        return as_json({"workers": [(await self._workers.replace(number))._asdict() for number in numbers]})

    def _present(self) -> Sequence[int]:
        if not (numbers := self._workers.serving()):
            raise WorkerUnreachable("No worker serves yet. Retry in a second.", retry_after_seconds=1.0)
        return numbers

    async def _metrics(self, request: web.Request) -> web.Response:
        numbers, path = self._present(), request.raw_path
        asked = [self._asked(request, number, path, body=b"", seconds=_SCRAPE_SECONDS) for number in numbers]
        found = dict(zip(numbers, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        answers = {number: each for number, each in found.items() if isinstance(each, WorkerAnswer)}
        if not answers:
            raise _unreachable(numbers[0])
        worst = _worst(answers)
        if worst.status != HTTPStatus.OK:
            return worst.response()
        encode, _ = choose_encoder(request.headers.get("accept", ""))
        pages = {number: answer.body for number, answer in answers.items()}
        body = await self._threads.run(merged, encode(self._workers), pages)
        return web.Response(body=body, headers={"content-type": worst.headers["content-type"]})

    async def _all(self, request: web.Request, path: str, seconds: float) -> dict[int, WorkerAnswer]:
        """The answers of all workers that serve. Raises WorkerUnreachable."""
        numbers, body = self._present(), await body_of(request)
        answers = await asyncio.gather(
            *[self._asked(request, number, path, body=body, seconds=seconds) for number in numbers]
        )
        return dict(zip(numbers, answers, strict=True))

    async def _asked(self, request: web.Request, number: int, path: str, body: bytes, seconds: float) -> WorkerAnswer:
        async with self._asking(request, number, path, body=body, seconds=seconds) as answer:
            try:
                return WorkerAnswer(answer.status, self._headers(answer, number), await answer.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _unreachable(number) from error

    async def _passed_on(self, request: web.Request, number: int, path: str) -> web.StreamResponse:
        """The answer of one worker, as it comes: it may be a stream without an end."""
        async with self._asking(request, number, path, body=await body_of(request), seconds=None) as answer:
            passed = web.StreamResponse(status=answer.status, headers=self._headers(answer, number))
            await passed.prepare(request)
            try:
                async for data in answer.content.iter_any():
                    await passed.write(data)
            except aiohttp.ClientError:
                passed.force_close()  # its end is missing, and the client must see that
                if request.transport is not None:
                    request.transport.abort()
                return passed
            await passed.write_eof()
            return passed

    @asynccontextmanager
    async def _asking(
        self, request: web.Request, number: int, path: str, body: bytes, seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        connector = aiohttp.UnixConnector(socket_path(self._folder, self._name, number), force_close=True)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            headers = _without_hops(request.headers)
            headers.popall("content-length", None)
            asked = session.request(
                request.method, URL(f"http://worker{path}", encoded=True), headers=headers, data=body or None,
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"), allow_redirects=False,
            )  # fmt: skip
            try:
                answer = await asked
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _unreachable(number) from error
            async with answer:
                yield answer

    def _headers(self, answer: aiohttp.ClientResponse, number: int) -> CIMultiDict[str]:
        headers = _without_hops(answer.headers)
        headers["x-gateway-worker"] = f"{number}/{self._count}"
        return headers


def _worst(answers: Mapping[int, WorkerAnswer]) -> WorkerAnswer:
    """A refusal, else an answer that says that something is left to be done, else that of the first worker."""
    found = [*answers.values()]
    bad = [each for each in found if each.status >= HTTPStatus.BAD_REQUEST]
    return [*bad, *[each for each in found if each.is_pending], *found][0]


def _best(answers: Mapping[int, WorkerAnswer]) -> WorkerAnswer:
    """The answer of a worker that is ready, if any is."""
    return min(answers.values(), key=lambda answer: answer.status)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GatewayError as error:
        return as_answer(error)


def _unreachable(number: int) -> WorkerUnreachable:
    return WorkerUnreachable(f"Worker {number} does not answer. Retry in a second.", retry_after_seconds=1.0)


def _without_hops(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)
