"""Sessions of the realtime API, over WebSocket."""

import secrets
from collections.abc import Mapping
from functools import partial

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.handler import RequestSource
from gateway.core.front.reply import RequestDispatcher
from gateway.core.front.routes import Route
from gateway.feature import Feature
from gateway.features.realtime.sessions import REALTIME, REALTIME_ROUTES, RealtimeSessions
from gateway.features.realtime.tunnel import Tunnels

_MASK_BYTES = 16


class RealtimeFeature(Feature):
    """Sessions; each holds a slot of a backend while it is open."""

    def __init__(self, core: Core) -> None:
        self._core = core
        config = core.config
        self.tunnels = Tunnels(
            core.relay, config.realtime, core.clock, random_key=partial(secrets.token_bytes, _MASK_BYTES)
        )
        self._dispatcher = core.new_dispatcher(self.tunnels.send)
        self.sessions = RealtimeSessions(
            core.fleet,
            self._dispatcher,
            new_id=core.new_id,
            unix_seconds=core.unix_seconds,
            spend=core.ledger.spend,
            cors_origins=config.server.cors_origins,
        )

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        return REALTIME_ROUTES

    def sources(self) -> Mapping[str, RequestSource]:
        return {REALTIME: self.sessions}

    def dispatchers(self) -> Mapping[str, RequestDispatcher]:
        return {REALTIME: self.sessions}

    def apply(self, config: Config) -> None:
        self._core.apply_to(self._dispatcher)
        self.tunnels.apply(config.realtime)
        self.sessions.apply(config.server.cors_origins)
