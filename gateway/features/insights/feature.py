"""The report on prefix reuse and cache misses."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import web

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.read import PromptSamples
from gateway.core.observe.record import Record
from gateway.feature import Feature
from gateway.features.insights.families import Breathe
from gateway.features.insights.page import PrefixPage
from gateway.features.insights.report import make_report
from gateway.features.insights.samples import PrefixReport


class InsightsFeature(Feature):
    """Owner of the samples of prompts, and of the report made of them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.report = PrefixReport(core.clock(), core.random, holders=core.cache_state.holders)
        self._page = PrefixPage(self._prepared)
        self.apply(core.config)

    def samples(self) -> PromptSamples | None:
        return self.report.samples if self.report.is_enabled else None

    def consumers(self) -> Iterable[Callable[[Record], None]]:
        return (self.report.finished,) if self.report.is_enabled else ()

    def admin_routes(self) -> Iterable[web.RouteDef]:
        return self._page.routes()

    def apply(self, config: Config) -> None:
        settings = config.prefix_report
        self.report.apply(enabled=settings.enabled, show_text=settings.show_text)

    def _prepared(self, window_seconds: float | None) -> Callable[[Breathe], dict[str, Any]] | None:
        if not self.report.is_enabled:
            return None
        self._core.finished.settle()
        return partial(make_report, self.report.snapshot(self._core.clock(), window_seconds))
