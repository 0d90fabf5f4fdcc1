"""Requests to a backend's own endpoints, bounded in time and size, and readers of its responses.

The readers are pure; a response of another shape than vLLM's raises ValueError.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, cast

import aiohttp
import orjson
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from gateway.core.backends.facts import KvEventSource, ModelCard
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.reachability import kind_of, release, why
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_metrics import Findings, LineFilter, MetricsReader
from gateway.core.tls.contexts import BackendContexts
from gateway.core.turns import SLICE_BYTES, Intake, in_turns

MAX_JSON_BYTES = 1048576
MAX_METRICS_BYTES = 4194304
MAX_MODELS = 10000
MAX_JSON_CONTAINERS = 32768  # objects and arrays, which take the longest to parse
MODELS_PATH = "/v1/models"
CHAT_PATH = "/v1/chat/completions"  # 404 where the models only embed, score or classify
METRICS_PATH = "/metrics"
KV_EVENT_SOURCES_PATH = "/kv_event_sources"
SERVER_INFO_PATH = "/server_info?config_format=json"  # 404 unless the server runs in development mode
_SERVER_INFO_TIMEOUT_SECONDS = 15.0  # the first call makes the server collect its environment


class ControlError(Exception):
    """A request to a backend's own endpoints failed. `status`: the HTTP status, if there was a response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Connection(ResponseHandler):
    """A connection of aiohttp whose long reads are taken in slices."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._intake = Intake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._intake.begin(cast(asyncio.Transport, transport), self.data_received)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._intake.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) > SLICE_BYTES:
            self._intake.cut(data)
            return
        super().data_received(data)
        if self._reading_paused:
            self._intake.hold()

    def resume_reading(self, *arguments: bool, **options: bool) -> None:
        super().resume_reading(*arguments, **options)
        if not self._reading_paused:
            self._intake.resumed()


class ControlClient:
    """Requests to backends' own endpoints. Each opens a new connection, so each shows whether connecting works.

    No proxies, cookies, redirects or compression: only the backend's own unmodified response counts.
    """

    _session: aiohttp.ClientSession  # inside the `async with` block

    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._tls = BackendContexts()
        self._metrics = MetricsReader()

    def apply(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        connector._factory = cast(Any, partial(_Connection, loop=asyncio.get_running_loop()))
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def probe(self, backend: BackendConfig) -> tuple[ProbeResult, str]:
        """Request /health, and say why that did not succeed. Only the status counts."""
        try:
            async with self._request(backend, "/health", self._timeout_seconds) as response:
                if response.status >= 500:
                    return ProbeResult.UNWELL, "/health reports an unhealthy engine"
                return ProbeResult.OK, ""
        except (aiohttp.ClientError, OSError) as error:
            release(error)
            if isinstance(error, TimeoutError):
                return ProbeResult.TIMEOUT, "/health timed out"
            return kind_of(error), why(error)

    async def read(self, backend: BackendConfig, path: str) -> Findings:
        """Read /metrics or a path of `READERS`; of a longer page of metrics, its first 4 MiB. Raises ControlError."""
        is_slow = path == SERVER_INFO_PATH
        async with self._answer(backend, path, _SERVER_INFO_TIMEOUT_SECONDS if is_slow else None) as response:
            if path != METRICS_PATH:
                return Findings(READERS[path](await _json_of(response, path)))
            lines, size = LineFilter(), 0
            async for piece in response.content.iter_chunked(SLICE_BYTES):
                lines.feed(piece)
                size += len(piece)
                if size > MAX_METRICS_BYTES:
                    break
            return await in_turns(self._metrics.read(lines.finish(), self._clock()))

    async def offers(self, backend: BackendConfig, path: str) -> bool | None:
        """Whether it has a path that takes POST, without sending one: GET is answered 405 there; None = not known."""
        try:
            async with self._request(backend, path, self._timeout_seconds) as response:
                return {404: False, 405: True}.get(response.status)
        except (aiohttp.ClientError, OSError):
            return None

    async def ask(self, backend: BackendConfig, path: str, document: Any = None) -> Any:
        """The JSON that a path answers with, to a JSON document if there is one. Raises ControlError."""
        async with self._answer(backend, path, document=document) as response:
            return await _json_of(response, path)

    async def command(self, backend: BackendConfig, path: str, document: Any = None) -> None:
        """Post a JSON document to a path, and wait until that is done. Raises ControlError."""
        async with self._answer(backend, path, document=document or {}):
            pass

    @asynccontextmanager
    async def _answer(
        self, backend: BackendConfig, path: str, timeout_seconds: float | None = None, document: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200. Anything else, and any error while it is read, becomes a ControlError."""
        try:
            async with self._request(backend, path, timeout_seconds or self._timeout_seconds, document) as response:
                if response.status != 200:
                    raise ControlError(f"{path} returned {response.status}", response.status)
                yield response
        except TimeoutError as error:
            raise ControlError(f"{path} timed out") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ControlError(f"{path}: {why(error)}") from error

    @asynccontextmanager
    async def _request(
        self, backend: BackendConfig, path: str, timeout_seconds: float, document: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        context, name = await self._tls.options(backend.tls) if backend.tls is not None else (True, None)
        async with self._session.request(
            "GET" if document is None else "POST",
            URL(backend.url + path, encoded=True),
            json=document,
            headers={"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else {},
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            allow_redirects=False,
            ssl=context,
            server_hostname=name,
        ) as response:
            yield response


async def _json_of(response: aiohttp.ClientResponse, path: str) -> Any:
    body = bytearray()
    async for piece in response.content.iter_chunked(SLICE_BYTES):
        body += piece
        if len(body) > MAX_JSON_BYTES:
            raise ControlError(f"{path} returned over {MAX_JSON_BYTES} bytes, the limit")
    if body.count(b"{") + body.count(b"[") > MAX_JSON_CONTAINERS:
        raise ControlError(f"{path} returned over {MAX_JSON_CONTAINERS} objects and arrays, the limit")
    return orjson.loads(body)


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
            sources.append(KvEventSource(int(rank), publisher, endpoint, replay_endpoint=replay_endpoint, topic=topic))
    return tuple(sources)


def read_max_num_seqs(document: Any) -> int:
    config = _mapping(_mapping(document, "server info").get("vllm_config"), "vLLM configuration")
    number = _mapping(config.get("scheduler_config"), "scheduler configuration").get("max_num_seqs")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError("max_num_seqs is missing")
    return number


READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    MODELS_PATH: lambda document: {"models": read_models(document)},
    "/version": lambda document: {"version": read_version(document)},
    KV_EVENT_SOURCES_PATH: lambda document: {"kv_event_sources": read_kv_event_sources(document)},
    SERVER_INFO_PATH: lambda document: {"max_num_seqs": read_max_num_seqs(document), "can_admin": True},
}  # the facts, by name, that each path's answer has


def _card(entry: dict[str, Any]) -> ModelCard:
    name, length = entry.get("id"), entry.get("max_model_len")
    if not isinstance(name, str) or not name:
        raise ValueError("a model has no id")
    if not isinstance(length, int):
        length = None
    return ModelCard(name, _text(entry, "root"), _text(entry, "parent"), max_model_len=length, raw=entry)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the {what} is not a JSON object")
    return value


def _text(entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return value if isinstance(value, str) else None
