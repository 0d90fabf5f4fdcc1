"""Traces of requests, which a receiver of OpenTelemetry gets."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from gateway import __version__
from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.handler import TraceSource
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.feature import Feature
from gateway.features.tracing.tracing import Tracing


class TracingFeature(Feature):
    """Traces a share of the requests. After a reload without an endpoint, none is traced."""

    def __init__(self, core: Core) -> None:
        fleet = core.fleet
        self.tracing = Tracing(
            core.config.tracing, __version__, core.clock, wall_clock=core.unix_seconds, url_of=fleet.url_of
        )

    def traces(self) -> TraceSource | None:
        return self.tracing.tracer

    def batch_consumers(self) -> Iterable[Callable[[list[Record]], None]]:
        return () if self.tracing.tracer is None else (self.tracing.finished,)

    def add_gauges(self, metrics: Metrics) -> None:
        self.tracing.add_gauges(metrics)

    def apply(self, config: Config) -> None:
        self.tracing.apply(config.tracing)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with self.tracing:
            yield
