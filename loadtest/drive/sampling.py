"""Samples the metrics pages of engines and gateways during a run, and beside them the GPUs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException
from typing import Self
from urllib.error import URLError
from urllib.request import Request, urlopen

from loadtest.access import Access
from loadtest.checkpoint import redaction
from loadtest.drive.gpu_pages import gpu_readings, keep_gpus
from loadtest.gpus import GpuSampler
from loadtest.report.schema import BackendGauges, GpuSeries, PageSeries, Samples

_INTERVAL_SECONDS = 1.0
_TIMEOUT_SECONDS = 2.0
# What is kept of a page: vLLM's names and the gateway's for the same thing. Ranks and backends are added up.
_KEPT: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "gateway_backend_in_flight"),
    "waiting": ("vllm:num_requests_waiting", "gateway_queued_requests"),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc",),
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
}
_SAMPLES = {
    key: re.compile(rf"^(?:{'|'.join(map(re.escape, names))})(?:\{{.*\}})?[ \t]+(\S+)", re.MULTILINE)
    for key, names in _KEPT.items()
}
# What a gateway reports of each of its backends.
_OF_BACKENDS = {"in_flight": "gateway_backend_in_flight", "limit": "gateway_backend_in_flight_limit"}
_BACKEND_SAMPLES = {
    key: re.compile(rf'^{name}\{{backend="((?:[^"\\]|\\.)*)"\}}[ \t]+(\S+)', re.MULTILINE)
    for key, name in _OF_BACKENDS.items()
}
_ESCAPED = re.compile(r"\\(.)")


class PageSampler:
    """Reads the pages, by name, inside the block; a page that does not answer misses that second."""

    def __init__(
        self, pages: Mapping[str, str], clock: Callable[[], float], access: Access | None = None, *, target: str = ""
    ) -> None:
        self._clock = clock
        self._access = access or Access()
        self._tls = self._access.tls()
        self._target = target
        self._over = threading.Event()
        self._series = [PageSeries(name=name, url=url) for name, url in pages.items()]
        self._gpus: dict[str, dict[str, GpuSeries]] = {name: {} for name in pages}
        self._threads = ThreadPoolExecutor(max(1, len(pages)), thread_name_prefix="metrics")

    def __enter__(self) -> Self:
        self._reading = [self._threads.submit(self._read, series) for series in self._series]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown()
        for reading in self._reading:
            reading.result()

    def series(self, origin: float) -> list[PageSeries]:
        """One for each page; call it after the block. Times count from `origin`."""
        return [
            series.model_copy(
                update={"at": [round(moment - origin, 3) for moment in series.at], "url": redaction.text(series.url)}
            )
            for series in self._series
        ]

    def gpus(self, origin: float) -> list[GpuSeries]:
        """Those that exporters reported on the pages; call it after the block."""
        found = [gpu for by_name in self._gpus.values() for gpu in by_name.values()]
        return [gpu.model_copy(update={"at": [round(moment - origin, 3) for moment in gpu.at]}) for gpu in found]

    def _read(self, series: PageSeries) -> None:
        due = self._clock()
        while not self._over.wait(max(0.0, due - self._clock())):
            due += _INTERVAL_SECONDS
            try:
                asked = Request(series.url, headers=self._access.headers_of(series.url, self._target))
                with urlopen(asked, timeout=_TIMEOUT_SECONDS, context=self._tls) as answer:
                    page = answer.read().decode("utf-8", "replace")
                whole, backends, gpus = page_values(page), backend_values(page), gpu_readings(page)
            except (URLError, OSError, HTTPException, ValueError):
                series.failures += 1
                continue
            now = self._clock()
            keep(series, now, whole, backends)
            keep_gpus(self._gpus[series.name], now, series.name, gpus)


def keep(
    series: PageSeries, at: float, values: Mapping[str, float], backends: Mapping[str, Mapping[str, float]]
) -> None:
    """Adds what was read at one moment; a backend that comes or goes has None where it was not reported."""
    for name in backends:
        missed: list[float | None] = [None] * len(series.at)
        series.backends.setdefault(name, BackendGauges(in_flight=[*missed], limit=[*missed]))
    series.at.append(at)
    for key in _KEPT:
        getattr(series, key).append(values.get(key))
    for name, gauges in series.backends.items():
        for key in _OF_BACKENDS:
            getattr(gauges, key).append(backends.get(name, {}).get(key))


def page_values(page: str) -> dict[str, float]:
    """What is kept of a page that has it. Usage of KV caches is that of the fullest."""
    found: dict[str, float] = {}
    for key, sample in _SAMPLES.items():
        values = [float(value) for value in sample.findall(page)]
        if values:
            found[key] = max(values) if key == "kv_cache_usage" else sum(values)
    return found


def backend_values(page: str) -> dict[str, dict[str, float]]:
    """What a gateway's page reports of each backend."""
    backends: dict[str, dict[str, float]] = {}
    for key, sample in _BACKEND_SAMPLES.items():
        for name, value in sample.findall(page):
            backends.setdefault(_ESCAPED.sub(_unescaped, name), {})[key] = float(value)
    return backends


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


class Sampling:
    """Watches inside the block; nothing of it runs afterwards."""

    def __init__(self, pages: Mapping[str, str], access: Access, target: str) -> None:
        self._gpus = GpuSampler(time.monotonic)
        self._pages = PageSampler(pages, time.monotonic, access, target=target)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._gpus)
        self._stack.enter_context(self._pages)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def samples(self, origin: float) -> Samples:
        """What was seen, in seconds from `origin` on the monotonic clock; call it after the block."""
        pages = self._pages.series(origin)
        if reported := self._pages.gpus(origin):  # which may be this machine's, and are those of the engines
            return Samples(gpus=reported, no_gpu=None, pages=pages)
        return Samples(gpus=self._gpus.series(origin), no_gpu=self._gpus.missing, pages=pages)
