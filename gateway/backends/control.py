"""The control plane's HTTP client: small questions to a backend, bounded in time and size."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from gateway.backends.backend import Backend
from gateway.backends.health import NOBODY_THERE, ProbeResult
from gateway.backends.reasons import why
from gateway.backends.telemetry import LineFilter, Scrape, read_scrape
from gateway.descriptors import are_used_up

MAX_JSON_BYTES = 1048576
MAX_METRICS_BYTES = 4194304
PIECE_BYTES = 65536


class ControlError(Exception):
    """A question was not answered as it should be. `status`: the HTTP status, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ControlClient:
    """Asks backends about themselves. Each question has a connection of its own, so each tells whether one comes about.

    No proxies, cookies, redirects or compression: an answer is taken from the backend itself, as it is, or not at all.
    """

    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def probe(self, backend: Backend, tell: Callable[[str], None] = lambda _: None) -> ProbeResult:
        """Ask /health. Only the status counts. `tell` is called with the reason why there was none."""
        try:
            async with _explained(tell), self._get(backend, "/health", self._timeout_seconds) as response:
                return ProbeResult.UNWELL if response.status >= 500 else ProbeResult.OK
        except aiohttp.ClientConnectorCertificateError:
            return ProbeResult.TIMEOUT  # says nothing about the backend's process
        except aiohttp.ClientConnectorError as error:
            if are_used_up(error.os_error):
                return ProbeResult.UNSENT
            if isinstance(error, aiohttp.ClientConnectorDNSError):
                return ProbeResult.TIMEOUT
            return ProbeResult.REFUSED if error.os_error.errno in NOBODY_THERE else ProbeResult.TIMEOUT
        except (TimeoutError, aiohttp.ClientError, OSError):
            return ProbeResult.TIMEOUT

    async def ask(self, backend: Backend, path: str, timeout_seconds: float | None = None) -> Any:
        """The JSON that a path answers with. Raises ControlError."""
        with _translated(path):
            async with self._get(backend, path, timeout_seconds or self._timeout_seconds) as response:
                return await _json_of(response, path)

    async def post(self, backend: Backend, path: str, document: Any, timeout_seconds: float | None = None) -> Any:
        """The JSON that a path answers a JSON document with. Raises ControlError."""
        with _translated(path):
            async with self._send(
                "POST", backend, path, timeout_seconds or self._timeout_seconds, orjson.dumps(document)
            ) as response:
                return await _json_of(response, path)

    async def scrape(self, backend: Backend) -> Scrape:
        """Read /metrics; of a longer page, its first 4 MiB. Raises ControlError."""
        with _translated("/metrics"):
            async with self._get(backend, "/metrics", self._timeout_seconds) as response:
                _expect_ok(response, "/metrics")
                lines, size = LineFilter(), 0
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    lines.feed(piece)
                    size += len(piece)
                    if size > MAX_METRICS_BYTES:
                        break
                return read_scrape(lines.finish(), self._clock())

    def _get(
        self, backend: Backend, path: str, timeout_seconds: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._send("GET", backend, path, timeout_seconds)

    @asynccontextmanager
    async def _send(
        self, method: str, backend: Backend, path: str, timeout_seconds: float, body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("the client is used outside its `async with` block")
        headers = {"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        async with self._session.request(
            method,
            URL(backend.config.url + path, encoded=True),
            data=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            allow_redirects=False,
        ) as response:
            yield response


@asynccontextmanager
async def _explained(tell: Callable[[str], None]) -> AsyncIterator[None]:
    try:
        yield
    except TimeoutError:
        raise  # which says it all
    except Exception as error:
        tell(why(error))
        raise


class _translated:
    """Turns what goes wrong with a question into a ControlError."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise ControlError(f"{self._path} timed out") from error
        if isinstance(error, aiohttp.ClientError | OSError | ValueError):
            raise ControlError(f"{self._path}: {why(error)}") from error


def _expect_ok(response: aiohttp.ClientResponse, path: str) -> None:
    if response.status != 200:
        raise ControlError(f"{path} returned {response.status}", response.status)


async def _json_of(response: aiohttp.ClientResponse, path: str) -> Any:
    _expect_ok(response, path)
    body = bytearray()
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        body += piece
        if len(body) > MAX_JSON_BYTES:
            raise ControlError(f"{path} returned over {MAX_JSON_BYTES} bytes, the limit")
    return orjson.loads(body)
