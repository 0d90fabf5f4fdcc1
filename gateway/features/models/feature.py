"""Aliases, canaries, fallback models, LoRA adapters that are loaded, and engines that sleep."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.read import FALLBACKS, ModelNames
from gateway.core.front.reply import RequestDispatcher
from gateway.core.supervisor import running
from gateway.feature import Feature
from gateway.features.models.adapter_loader import AdapterLoader
from gateway.features.models.aliases import Aliases
from gateway.features.models.fallback import Fallbacks
from gateway.features.models.sleep import Sleeper

_LOOK_SECONDS = 0.5  # between looks at whether aliases name models


class ModelsFeature(Feature):
    """Applies the section `models` of the configuration, except for tokenizers."""

    def __init__(self, core: Core) -> None:
        self._core = core
        fleet, waiting = core.fleet, core.queue.waiting
        self._sleeper = Sleeper(fleet, waiting, core.clock, supervisor=core.supervisor)
        self._adapter_loader = AdapterLoader(fleet, waiting, core.clock, supervisor=core.supervisor)
        self._adapter_loader.apply(core.config.models.adapters)
        self._fallbacks = Fallbacks(
            fleet,
            core.feature_dispatcher,
            core.prompts.complete,
            fell_back=core.metrics.fallbacks.add,
            clock=core.clock,
        )

    def names(self, config: Config) -> ModelNames:
        return Aliases.configured(config.models, self._core.fleet.names.first)

    def dispatchers(self) -> Mapping[str, RequestDispatcher]:
        return {FALLBACKS: self._fallbacks}

    def apply(self, config: Config) -> None:
        self._adapter_loader.apply(config.models.adapters)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._sleeper.commands)
            await stack.enter_async_context(self._adapter_loader.commands)
            yield

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with running(self._warn_of_aliases()):
            yield

    async def _warn_of_aliases(self) -> None:
        """Warn of aliases that name no model, once for each, as soon as the models of all backends are known."""
        core, warned = self._core, set[str]()
        while True:
            if core.fleet.backends and core.fleet.is_known:
                found = core.config.models.unserved([card.id for card in core.fleet.models()])
                for warning in [each for each in found if each not in warned]:
                    structlog.get_logger("gateway").warning("alias_without_model", hint=warning)
                warned |= {*found}
            await asyncio.sleep(_LOOK_SECONDS)
