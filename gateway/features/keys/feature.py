"""API keys: permissions, limits, and usage."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.feature import Feature
from gateway.features.keys.client_keys import ClientKeys
from gateway.features.keys.limits import AllLimits
from gateway.features.keys.rate_limits import ApiKeys
from gateway.features.keys.usage import KeyUsage
from gateway.features.keys.usage_page import UsagePage

_STEP_SECONDS = 1.0  # between looks at the keys file


class KeysFeature(Feature):
    """Owner of the keys in effect, of their limits, and of their usage."""

    def __init__(self, core: Core) -> None:
        """Raises ConfigError if the keys file cannot be used."""
        self._core = core
        self.client_keys = ClientKeys(core.config.auth, self.refresh)
        self.limits = AllLimits(core.clock, core.unix_seconds)
        self.usage = KeyUsage(core.unix_seconds)
        self._page = UsagePage(self.usage_now, self.usage.last_days, core.unix_seconds)
        core.ledger.count(self.usage.counted)
        core.on_replicas.append(self.refresh)
        self.refresh()

    def refresh(self) -> None:
        """Take over the keys in effect. Each of several gateways has an equal part of their limits."""
        core, keys = self._core, self.client_keys
        replicas = core.replicas()
        divided = [key.divided(replicas) for key in keys.keys]
        self.limits.apply(divided)
        core.ledger.apply(self.limits.by_name)
        self.usage.apply(has_keys=keys.are_needed)
        check = ApiKeys(divided, core.unix_seconds).check if keys.are_needed else None
        core.use_keys(keys.keys, check)

    def batch_consumers(self) -> Iterable[Callable[[list[Record]], None]]:
        return (self.usage.finished,) if self.client_keys.are_needed else ()

    def admin_routes(self) -> Iterable[web.RouteDef]:
        return self._page.routes()

    def add_gauges(self, metrics: Metrics) -> None:
        self.usage.add_gauges(metrics)

    def read_ahead(self, config: Config) -> None:
        self.client_keys.read_ahead(config.auth)

    def apply(self, config: Config) -> None:
        self.client_keys.apply(config.auth)
        self.refresh()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._core.supervisor.repeating("keys_file", self.client_keys.step, _STEP_SECONDS):
            yield

    def usage_now(self) -> dict[str, Any]:
        self._core.finished.settle()
        return self.usage.state()
