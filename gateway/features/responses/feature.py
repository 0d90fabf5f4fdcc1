"""Responses that backends store or continue in the background."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.observe.metrics import Metrics
from gateway.feature import Feature
from gateway.features.responses.background import BackgroundResponses
from gateway.features.responses.stored import StoredResponses


class ResponsesFeature(Feature):
    """Owner of the places of stored responses, and of background responses."""

    def __init__(self, core: Core) -> None:
        config, over = core.config.upstream, core.ledger.over
        self.background = BackgroundResponses(
            core.lease_broker, core.relay.send, config=config, clock=core.clock, supervisor=core.supervisor, over=over
        )
        self.stored = StoredResponses(self.background.look)
        core.keep_with(self.background.keep)

    def store(self) -> StoredResponses:
        return self.stored

    def add_gauges(self, metrics: Metrics) -> None:
        self.background.add_gauges(metrics)

    def apply(self, config: Config) -> None:
        self.background.apply(config.upstream)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.background.stop()
