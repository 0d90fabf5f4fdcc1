"""Exact mode: engines' caches by their own KV events, and prompts as tokens."""

from contextlib import AbstractAsyncContextManager

from gateway.config import Config
from gateway.core.core import Core
from gateway.feature import Feature
from gateway.features.exact.mode import ExactMode


class ExactFeature(Feature):
    """Exact mode, which imports most of its modules when they are needed."""

    def __init__(self, core: Core) -> None:
        fleet = core.fleet
        self.mode = mode = ExactMode(
            core.config.models, fleet, core.cache_state, clock=core.clock, supervisor=core.supervisor
        )
        fleet.on_change.append(mode.fleet_changed)
        fleet.on_facts.append(mode.facts_changed)
        fleet.on_restart.append(mode.restarted)
        fleet.on_leave.append(mode.left)

    def prompts(self) -> ExactMode:
        return self.mode

    def apply(self, config: Config) -> None:
        self.mode.apply(config.models)

    def running(self) -> AbstractAsyncContextManager[None]:
        return self.mode.running()
