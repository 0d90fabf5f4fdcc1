"""Backends that are found: in a file, by DNS, or in Kubernetes."""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from gateway.config import Config
from gateway.core.core import Core
from gateway.feature import Feature
from gateway.features.discovery.follow import Discovery


class DiscoveryFeature(Feature):
    """Follows the configured sources."""

    def __init__(self, core: Core) -> None:
        self.discovery = Discovery(core.config.discovery, core.membership, core.supervisor, random=core.random)

    def origins(self) -> Iterable[str]:
        return self.discovery.names

    def apply(self, config: Config) -> None:
        self.discovery.apply(config.discovery)

    def running(self) -> AbstractAsyncContextManager[Discovery]:
        return self.discovery
