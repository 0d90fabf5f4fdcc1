"""Samples GPUs (nvidia-smi, twice a second) and the metrics pages of engines and gateways during a run."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

from loadtest.checkpoint import redaction
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

    def __init__(self, pages: Mapping[str, str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._over = threading.Event()
        self._series = [PageSeries(name=name, url=url) for name, url in pages.items()]
        self._threads = ThreadPoolExecutor(max(1, len(pages)), thread_name_prefix="metrics")

    def __enter__(self) -> Self:
        self._reading = [self._threads.submit(self._read, series) for series in self._series]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _read(self, series: PageSeries) -> None:
        due = self._clock()
        while not self._over.wait(max(0.0, due - self._clock())):
            due += _INTERVAL_SECONDS
            try:
                with urlopen(series.url, timeout=_TIMEOUT_SECONDS) as answer:
                    page = answer.read().decode("utf-8", "replace")
                whole, backends = page_values(page), backend_values(page)
            except (URLError, OSError, ValueError):
                series.failures += 1
                continue
            keep(series, self._clock(), whole, backends)


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


_INTERVAL_MS = 500
_FIELDS = "index,name,driver_version,utilization.gpu,memory.used,memory.total,power.draw"
_END_SECONDS = 5.0


class GpuSampler:
    """Runs nvidia-smi inside the block. `missing` gives the reason why there are no figures, or no more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._odd_line = ""
        self._gpus: dict[str, GpuSeries] = {}
        self.missing: str | None = None

    def __enter__(self) -> Self:
        program = shutil.which("nvidia-smi")
        if program is None:
            self.missing = "no GPU: nvidia-smi is not installed here"
            return self
        try:
            self._start(program)
        except OSError as error:
            self.missing = f"no GPU: nvidia-smi cannot be run: {error.strerror}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._reader is None:
            return
        ended_by_itself = self._process.poll()
        self._stop(self._process)
        self._reader.join(_END_SECONDS)
        if not self._gpus:
            self.missing = f"no GPU: nvidia-smi says {self._odd_line or 'nothing'}"
        elif ended_by_itself is not None:
            said = f": {self._odd_line}" if self._odd_line else ""
            self.missing = f"nvidia-smi ended during the run, exit code {ended_by_itself}{said}"

    def series(self, origin: float) -> list[GpuSeries]:
        """One for each GPU; call it after the block. Times count from `origin`."""
        return [
            gpu.model_copy(update={"at": [round(moment - origin, 3) for moment in gpu.at]})
            for _, gpu in sorted(self._gpus.items(), key=lambda item: int(item[0]))
        ]

    def _start(self, program: str) -> None:
        # To a terminal it writes line by line; into a pipe it would hold back what it has.
        ours, theirs = pty.openpty()
        command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", f"--loop-ms={_INTERVAL_MS}"]
        try:
            # In a process group of its own: Ctrl-C is for the run, which ends it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, process_group=0
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            # A driver that hangs holds even a killed process; the run does not wait for it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)

    def _read(self, terminal: int) -> None:
        with os.fdopen(terminal, "rb") as lines:
            try:
                for line in lines:
                    self._take(line.decode("utf-8", "replace").strip())
            except OSError:
                return  # a terminal whose other end is closed raises this

    def _take(self, line: str) -> None:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS.split(",")) or not cells[0].isdecimal():
            self._odd_line = self._odd_line or line
            return
        index, name, driver, busy, used, total, power = cells
        gpu = self._gpus.setdefault(
            index, GpuSeries(name=f"{index} {name}", driver=driver, memory_total_mib=_number(total))
        )
        gpu.at.append(self._clock())
        gpu.utilization_percent.append(_number(busy))
        gpu.memory_used_mib.append(_number(used))
        gpu.power_watts.append(_number(power))


def _number(text: str) -> float | None:
    """None for what a GPU does not report, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return None


class Sampling:
    """Watches inside the block; nothing of it runs afterwards."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._gpus = GpuSampler(time.monotonic)
        self._pages = PageSampler(pages, time.monotonic)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._gpus)
        self._stack.enter_context(self._pages)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def samples(self, origin: float) -> Samples:
        """What was seen, in seconds from `origin` on the monotonic clock; call it after the block."""
        return Samples(gpus=self._gpus.series(origin), no_gpu=self._gpus.missing, pages=self._pages.series(origin))
