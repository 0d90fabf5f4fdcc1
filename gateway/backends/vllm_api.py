"""Requests to a backend's own endpoints, bounded in time and size, and readers of its responses.

The readers are pure; a response of another shape than vLLM's raises ValueError. The page /metrics of a busy server has
thousands of lines. `LineFilter` keeps the few that matter while the page comes in, so that neither its size nor its
parsing holds up the event loop.
"""

import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, NamedTuple, Self

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from yarl import URL

from gateway.backends.facts import AdapterReport, KvEventSource, ModelCard, Telemetry
from gateway.backends.health import ProbeResult
from gateway.backends.reachability import kind_of, why
from gateway.config.backends import BackendConfig
from gateway.tls import BackendContexts

MAX_JSON_BYTES = 1048576
MAX_METRICS_BYTES = 4194304
MAX_LINE_BYTES = 65536
MAX_LINES = 1024  # the wanted lines of a hundred data-parallel ranks
MAX_MODELS = 10000
PIECE_BYTES = 65536
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


class Findings(NamedTuple):
    """What a path answered: `Facts` by name, and the load if it is /metrics of vLLM."""

    facts: dict[str, Any]
    telemetry: Telemetry | None = None


class ControlClient:
    """Requests to backends' own endpoints. Each opens a new connection, so each shows whether connecting works.

    No proxies, cookies, redirects or compression: only the backend's own unmodified response counts.
    """

    _session: aiohttp.ClientSession  # inside the `async with` block

    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._tls = BackendContexts()

    def follow(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
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
        except TimeoutError:
            return ProbeResult.TIMEOUT, "/health timed out"
        except (aiohttp.ClientError, OSError) as error:
            return kind_of(error), why(error)

    async def read(self, backend: BackendConfig, path: str) -> Findings:
        """Read /metrics or a path of `READERS`; of a longer page of metrics, its first 4 MiB. Raises ControlError."""
        is_slow = path == SERVER_INFO_PATH
        async with self._answer(backend, path, _SERVER_INFO_TIMEOUT_SECONDS if is_slow else None) as response:
            if path != METRICS_PATH:
                return Findings(READERS[path](await _json_of(response, path)))
            lines, size = LineFilter(), 0
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                lines.feed(piece)
                size += len(piece)
                if size > MAX_METRICS_BYTES:
                    break
            return read_scrape(lines.finish(), self._clock())

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

    def _request(
        self, backend: BackendConfig, path: str, timeout_seconds: float, document: Any = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        context, name = self._tls.options(backend.tls) if backend.tls is not None else (True, None)
        return self._session.request(
            "GET" if document is None else "POST",
            URL(backend.url + path, encoded=True),
            json=document,
            headers={"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else {},
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            allow_redirects=False,
            ssl=context,
            server_hostname=name,
        )


async def _json_of(response: aiohttp.ClientResponse, path: str) -> Any:
    body = bytearray()
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        body += piece
        if len(body) > MAX_JSON_BYTES:
            raise ControlError(f"{path} returned over {MAX_JSON_BYTES} bytes, the limit")
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
            sources.append(KvEventSource(int(rank), publisher, endpoint, replay_endpoint, topic))
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
    return ModelCard(name, _text(entry, "root"), _text(entry, "parent"), length, entry)


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the {what} is not a JSON object")
    return value


def _text(entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return value if isinstance(value, str) else None


class _Name(StrEnum):
    RUNNING = "vllm:num_requests_running"
    WAITING = "vllm:num_requests_waiting"
    WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
    KV_USAGE = "vllm:kv_cache_usage_perc"
    PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
    PREEMPTIONS = "vllm:num_preemptions_total"
    GENERATION = "vllm:generation_tokens_total"
    CACHE_CONFIG = "vllm:cache_config_info"
    SLEEP_STATE = "vllm:engine_sleep_state"
    ADAPTERS = "vllm:lora_requests_info"


_PROCESS_START = "process_start_time_seconds"
_WANTED = (*(f"{name}{{".encode() for name in _Name), f"{_PROCESS_START} ".encode())


_ADAPTERS = f"{_Name.ADAPTERS}{{".encode()


class LineFilter:
    """Keeps the wanted lines of a page that comes in pieces, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._adapters = b""  # the newest line: vLLM adds one for each set of adapters that it ever ran
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        *lines, rest = (self._rest + piece).split(b"\n")
        self._keep(lines)
        # A line that is too long is cut; its end does not start like a wanted line.
        self._rest = rest if len(rest) <= MAX_LINE_BYTES else b"#"

    def finish(self) -> str:
        self._keep([self._rest])
        self._rest = b""
        lines = [*self._kept, self._adapters] if self._adapters else self._kept
        return b"\n".join(lines).decode("utf-8", "replace") + "\n"

    def _keep(self, lines: list[bytes]) -> None:
        wanted = [line for line in lines if line.startswith(_WANTED)]
        if adapters := [line for line in wanted if line.startswith(_ADAPTERS)]:
            wanted = [line for line in wanted if not line.startswith(_ADAPTERS)]
            self._adapters = max([self._adapters, *adapters], key=_value_of)
        self._kept += wanted[: MAX_LINES - len(self._kept)]


def _value_of(line: bytes) -> float:
    try:
        return float(line.rpartition(b" ")[2])
    except ValueError:
        return -math.inf


def read_scrape(text: str, at_seconds: float) -> Findings:
    """Read filtered lines. Raises ValueError if it is not in the exposition format."""
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append(sample)

    def total(name: str) -> float:
        return sum(sample.value for sample in samples[name])

    if not samples[_Name.RUNNING]:
        return Findings({})
    configs = [sample.labels for sample in samples[_Name.CACHE_CONFIG]]
    starts = [sample.value for sample in samples[_PROCESS_START]]
    facts = {
        "engines": max(1, len({sample.labels.get("engine") for sample in samples[_Name.RUNNING]})),
        "block_size_tokens": _integer(configs[0].get("block_size")) if configs else None,
        "kv_cache_tokens": sum(filter(None, map(_kv_cache_tokens, configs))) or None,
        "prefix_caching": configs[0].get("enable_prefix_caching") == "True" if configs else None,
        "process_start_seconds": starts[0] if starts else None,
    }
    # Others wait for an adapter, or for blocks from elsewhere.
    for_capacity = [sample for sample in samples[_Name.WAITING_BY_REASON] if sample.labels.get("reason") == "capacity"]
    waiting = for_capacity or samples[_Name.WAITING]
    telemetry = Telemetry(
        at_seconds,
        running=int(total(_Name.RUNNING)),
        waiting=int(sum(sample.value for sample in waiting)),
        preemptions=total(_Name.PREEMPTIONS),
        kv_usage=max((sample.value for sample in samples[_Name.KV_USAGE]), default=0.0),
        generation_tokens=total(_Name.GENERATION) if samples[_Name.GENERATION] else None,
        prefix_queries_tokens=total(_Name.PREFIX_QUERIES),
        sleep_state=next(
            (state.labels.get("sleep_state") for state in samples[_Name.SLEEP_STATE] if state.value), None
        ),
        adapters=_adapters(samples[_Name.ADAPTERS]),
    )
    return Findings(facts, telemetry)


def _adapters(samples: list[Sample]) -> AdapterReport | None:
    """The adapters of the newest sample: values are times. An engine without LoRA reports 0 slots."""
    if not samples:
        return None
    labels = max(samples, key=lambda sample: sample.value).labels
    most = _integer(labels.get("max_lora"))
    names = f"{labels.get('running_lora_adapters', '')},{labels.get('waiting_lora_adapters', '')}".split(",")
    return AdapterReport(frozenset(filter(None, map(str.strip, names))), most) if most else None


def _kv_cache_tokens(config: dict[str, str]) -> int | None:
    if (tokens := _integer(config.get("kv_cache_size_tokens"))) is not None:
        return tokens
    # Older versions do not say. The product is too large for models that mix attention kinds.
    blocks, block_size = _integer(config.get("num_gpu_blocks")), _integer(config.get("block_size"))
    if blocks is None or block_size is None or blocks <= 1:  # encoders have no KV cache, only one unused block
        return None
    return blocks * block_size


def _integer(label: str | None) -> int | None:
    """Labels hold Python's text of a value: a number, or None."""
    return int(label) if label is not None and label.isascii() and label.isdigit() else None
