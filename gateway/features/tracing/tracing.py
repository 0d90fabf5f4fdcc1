"""Sends the traces of sampled requests to an OTLP receiver, in a thread of its own. It needs the extra `otel`.

A receiver that is slow or gone costs traces, which are counted, and never delays a request.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import structlog

from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.supervisor import LogThrottle
from gateway.features.tracing.otlp import GrpcReceiver, HttpReceiver, NotTaken, OtlpReceiver, OtlpSettings
from gateway.features.tracing.settings import TracingConfig
from gateway.features.tracing.spans import Spans
from gateway.features.tracing.trace import Finished, RequestTrace, Tracer

MAX_HELD_TRACES = 4096
EXPORTED_AT_ONCE = 128  # traces: an export costs the same as the spans of a dozen
_EXIT_SECONDS = 2.0
_BREATH_TRACES = 16  # that are made into spans before others get the interpreter
_BREATH_SECONDS = 0.0005


class Tracing:
    """Collects finished traces, and exports them while its `with` block runs. `url_of`: a backend's URL by its name."""

    def __init__(
        self,
        config: TracingConfig,
        version: str,
        clock: Callable[[], float],
        *,
        wall_clock: Callable[[], float],
        url_of: Callable[[str], str],
    ) -> None:
        self._exported = self._unsent = self._overflow = 0  # traces; the last one is counted on the event loop
        self.tracer: Tracer | None = None
        self._version = version
        self._clock, self._wall_clock = clock, wall_clock
        self._url_of = url_of
        self._throttle = LogThrottle(clock)
        self._traces: deque[Finished] = deque()
        self._stop = threading.Event()
        self._wake = threading.Event()  # there are enough traces, or the gateway stops
        self._runs = False
        self._thread: threading.Thread | None = None
        self._exporter: Exporter | None = None  # of the thread, once that runs
        self.apply(config)

    def apply(self, config: TracingConfig) -> None:
        """Take over receiver and sampling of traces, also for requests in flight."""
        self._config = config
        self.tracer = Tracer(config.sample_ratio, os.urandom, self._clock) if config.endpoint else None
        self._wake.set()  # from a longer interval

    def add_gauges(self, metrics: Metrics) -> None:
        text = "Traces of requests, by result: exported, or dropped because they could not be sent."
        metrics.counter(
            "gateway_traces_total", text, ("result",), lambda: [((name,), count) for name, count in self.totals.items()]
        )

    @property
    def totals(self) -> dict[str, int]:
        return {"exported": self._exported, "dropped": self._unsent + self._overflow}

    def finished(self, records: list[Record]) -> None:
        """Queue the traced requests. Called on the event loop."""
        if self.tracer is None:
            return
        for record in records:
            trace = record.trace
            if trace is None or not isinstance(trace, RequestTrace):
                continue
            if len(self._traces) >= MAX_HELD_TRACES:
                self._overflow += 1
                continue
            names = {attempt.backend for attempt in trace.attempts} | {record.backend}
            urls = {name: self._url_of(name) for name in names}
            self._traces.append(Finished(record, trace, urls, self._wall_clock() - self._clock()))
        if len(self._traces) >= EXPORTED_AT_ONCE:
            self._wake.set()
        if self._traces and self._thread is None and self._runs:
            self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        self._runs = True
        return self

    def __exit__(self, *_: object) -> None:
        self._runs = False
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)  # a receiver that hangs keeps the thread, not the process
        self._unsent += len(self._traces)
        self._traces.clear()
        if self._exporter is not None:
            self._exporter.close()  # which ends its retries

    def _made(self, config: TracingConfig) -> "Exporter":
        return Exporter(config, self._version, self._stop.wait, clock=self._clock)

    def _run(self) -> None:
        while not self._stop.is_set():
            is_full = self._wake.wait(self._config.export_interval_seconds)
            self._wake.clear()
            self._export(EXPORTED_AT_ONCE if is_full else 1)
        self._export(1)

    def _export(self, least: int) -> None:
        """Export all traces, up to a rest of fewer than this."""
        while len(self._traces) >= least and (taken := self.take(EXPORTED_AT_ONCE)):
            try:
                reason = self._exporter_now().export(taken)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if not reason:
                self._exported += len(taken)
                continue
            self._unsent += len(taken)
            if self._throttle.allows("traces_dropped"):
                log = structlog.get_logger("gateway")
                log.warning("traces_dropped", endpoint=self._config.endpoint, reason=reason, dropped=self._unsent)

    def take(self, most: int) -> list[Finished]:
        """Remove and return up to this many finished traces, oldest first."""
        taken: list[Finished] = []
        with suppress(IndexError):
            while len(taken) < most:
                taken.append(self._traces.popleft())
        return taken

    def _exporter_now(self) -> "Exporter":
        """That of the configuration; after tracing was disabled, the last one, for the traces that are left."""
        exporter, config = self._exporter, self._config
        if exporter is None or (config.endpoint and exporter.config != config):
            if exporter is not None:
                exporter.close()
            exporter = self._exporter = self._made(config)
        return exporter


class Exporter:
    """One receiver's exporter. `pause` waits that many seconds, and less while the gateway stops."""

    def __init__(
        self, config: TracingConfig, version: str, pause: Callable[[float], bool], *, clock: Callable[[], float]
    ) -> None:
        self.config = config
        self._pause, self._clock = pause, clock
        self._spans = Spans(config.service_name, version, os.urandom)
        self._receiver = _receiver(config, version)

    def export(self, traces: list[Finished]) -> str:
        """Send the spans of these requests; gives the reason if the receiver did not take them."""
        encoded = self._spans.export(traces, self._breathe, _BREATH_TRACES)
        until = self._clock() + self._receiver.timeout_seconds
        backoff_seconds = 1.0
        while True:
            try:
                self._receiver.send(encoded, max(0.1, until - self._clock()))
            except NotTaken as error:
                seconds = error.retry_after_seconds or backoff_seconds
                may_retry = error.is_passing and self._clock() + seconds < until
                if not may_retry or self._pause(seconds):
                    return error.reason
                backoff_seconds *= 2
            else:
                return ""

    def _breathe(self) -> None:
        """Let the event loop have the interpreter lock."""
        self._pause(_BREATH_SECONDS)

    def close(self) -> None:
        self._receiver.close()


def _receiver(config: TracingConfig, version: str) -> OtlpReceiver:
    settings = OtlpSettings.of(os.environ, user_agent=f"vllm-batching-gateway/{version}")
    return (GrpcReceiver if config.protocol == "grpc" else HttpReceiver)(config.url, settings)
