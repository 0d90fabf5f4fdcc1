"""The operators' side of a gateway, as the composition root and the process use it; `operators.py` has all of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from gateway.config import Config
from gateway.core.front.read import RequestReader
from gateway.core.listeners import Listeners
from gateway.features.handover.ports import Port, Streams
from gateway.features.handover.snapshot import Knowledge


class OperatorPorts(ABC):
    """The ports for operators, the streams of the dashboard, and the state kept by restarts."""

    admin_port: Port
    metrics_port: Port
    dashboard: Streams
    knowledge: Knowledge

    @abstractmethod
    def apply(self, config: Config, reader: RequestReader) -> None:
        """Take over another configuration; `reader`: of dry runs."""

    @abstractmethod
    def reloaded(self) -> None:
        """All of another configuration is in force."""

    @abstractmethod
    def listening(
        self, listeners: Listeners, routes: Sequence[web.RouteDef] = ()
    ) -> AbstractAsyncContextManager[int | None]:
        """Serve both ports while the block runs; yields the admin port."""
