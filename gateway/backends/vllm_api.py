"""Requests to a backend's own endpoints, bounded in time and size, and readers of its JSON responses.

The readers are pure; a response of another shape than vLLM's raises ValueError.
"""

import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from gateway.backends.backend import Backend
from gateway.backends.facts import Facts, KvEventSource, ModelCard
from gateway.backends.health import UNREACHABLE_ERRNOS, ProbeResult
from gateway.backends.vllm_metrics import LineFilter, Scrape, read_scrape
from gateway.resources import are_used_up

MAX_JSON_BYTES = 1048576
MAX_METRICS_BYTES = 4194304
PIECE_BYTES = 65536


class ControlError(Exception):
    """A request to a backend's own endpoints failed. `status`: the HTTP status, if there was a response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ControlClient:
    """Requests to backends' own endpoints. Each opens a new connection, so each shows whether connecting works.

    No proxies, cookies, redirects or compression: only the backend's own unmodified response counts.
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

    async def probe(self, backend: Backend, on_failure: Callable[[str], None] = lambda _: None) -> ProbeResult:
        """Request /health. Only the status counts. `on_failure` gets the reason if there was no response."""
        try:
            async with _explained(on_failure), self._get(backend, "/health", self._timeout_seconds) as response:
                return ProbeResult.UNWELL if response.status >= 500 else ProbeResult.OK
        except aiohttp.ClientConnectorCertificateError:
            return ProbeResult.TIMEOUT  # says nothing about the backend's process
        except aiohttp.ClientConnectorError as error:
            if are_used_up(error.os_error):
                return ProbeResult.UNSENT
            if isinstance(error, aiohttp.ClientConnectorDNSError):
                return ProbeResult.TIMEOUT
            return ProbeResult.REFUSED if error.os_error.errno in UNREACHABLE_ERRNOS else ProbeResult.TIMEOUT
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
async def _explained(on_failure: Callable[[str], None]) -> AsyncIterator[None]:
    try:
        yield
    except TimeoutError:
        raise  # needs no reason
    except Exception as error:
        on_failure(why(error))
        raise


class _translated:
    """Turns the errors of a request into a ControlError."""

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


MODELS_PATH = "/v1/models"
VERSION_PATH = "/version"
KV_EVENT_SOURCES_PATH = "/kv_event_sources"
SERVER_INFO_PATH = "/server_info?config_format=json"  # 404 unless the server runs in development mode

MAX_MODELS = 10000


def read_models(document: Any) -> tuple[ModelCard, ...]:
    entries = _mapping(document, "models").get("data")
    if not isinstance(entries, list) or len(entries) > MAX_MODELS:
        raise ValueError("the list of models is missing or too long")
    return tuple(_card(_mapping(entry, "model")) for entry in entries)


def read_version(document: Any) -> str:
    version = _mapping(document, "version").get("version")
    if not isinstance(version, str):
        raise ValueError("the version is missing")
    return version[:64]


def read_kv_event_sources(document: Any) -> tuple[KvEventSource, ...]:
    """The publishers of /kv_event_sources, by data-parallel rank; empty where KV events are off."""
    sources = []
    for rank, source in sorted(_mapping(document, "KV event sources").items()):
        settings = _mapping(source, "KV event source")
        if not rank.isascii() or not rank.isdigit():
            raise ValueError("a KV event source has no rank")
        if settings.get("enable_kv_cache_events"):
            publisher, endpoint = _text(settings, "publisher"), _text(settings, "endpoint")
            replay_endpoint, topic = _text(settings, "replay_endpoint"), _text(settings, "topic") or ""
            sources.append(KvEventSource(int(rank), publisher, endpoint, replay_endpoint, topic))
    return tuple(sources)


def read_max_num_seqs(document: Any) -> int:
    config = _mapping(_mapping(document, "server info").get("vllm_config"), "vLLM configuration")
    number = _mapping(config.get("scheduler_config"), "scheduler configuration").get("max_num_seqs")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError("max_num_seqs is missing")
    return number


def with_models(facts: Facts, document: Any) -> Facts:
    """The facts with what /v1/models answered."""
    return replace(facts, models=read_models(document))


def with_version(facts: Facts, document: Any) -> Facts:
    """The facts with what /version answered."""
    return replace(facts, version=read_version(document))


def with_kv_event_sources(facts: Facts, document: Any) -> Facts:
    """The facts with what /kv_event_sources answered."""
    return replace(facts, kv_event_sources=read_kv_event_sources(document))


def with_server_info(facts: Facts, document: Any) -> Facts:
    """The facts with what /server_info answered: that it answers shows that the development endpoints are on."""
    return replace(facts, max_num_seqs=read_max_num_seqs(document), can_admin=True)


def without_server_info(facts: Facts) -> Facts:
    """The facts without those that only /server_info has."""
    return replace(facts, max_num_seqs=None, can_admin=False)


def _card(entry: dict[str, Any]) -> ModelCard:
    name, length = entry.get("id"), entry.get("max_model_len")
    if not isinstance(name, str) or not name:
        raise ValueError("a model has no id")
    if not isinstance(length, int):
        length = None
    return ModelCard(name, _text(entry, "root"), _text(entry, "parent"), length, entry)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the {what} is not a JSON object")
    return value


def _text(entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return value if isinstance(value, str) else None


def why(error: BaseException) -> str:
    """A short reason, without the backend's address."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    match cause:
        case ssl.SSLCertVerificationError():
            return f"TLS: {cause.verify_message.rstrip('.')}"
        case ssl.SSLError():
            return f"TLS: {(getattr(cause, 'reason', None) or str(cause)).lower().replace('_', ' ')}"
        case socket.gaierror():
            return f"host name not resolved: {(cause.strerror or str(cause)).lower()}"
        case TimeoutError():
            return "timed out"
        case aiohttp.ServerDisconnectedError():
            return "connection closed without a response"
        case aiohttp.ClientResponseError():
            return f"the response is not HTTP: {cause.message.splitlines()[0] if cause.message else cause.status}"
        case OSError() if cause.errno is not None and cause.errno > 0:
            return os.strerror(cause.errno).lower()
    return str(cause) or type(cause).__name__
