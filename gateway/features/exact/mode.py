"""Exact mode as the rest of the gateway sees it: in use once a model has a tokenizer or an engine publishes KV events.

The modules that follow events and run tokenizers are imported then. Most gateways never need them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.feedback import CacheState
from gateway.core.request import InferenceRequest
from gateway.core.supervisor import Supervisor
from gateway.features.exact.endpoints import Source, plan
from gateway.features.exact.index import ExactIndex
from gateway.features.exact.prompts import RESULTS, ExactPrompts
from gateway.features.models.settings import ModelsConfig

if TYPE_CHECKING:
    from gateway.features.exact.caches import ExactCaches
    from gateway.features.exact.feed import KvEvents
    from gateway.features.exact.tokenization import NotCounted, Tokenization

_RETRY_SECONDS = 5.0  # after a start that failed


@dataclass(frozen=True, slots=True)
class ExactParts:
    """The parts that exist only while exact mode is in use."""

    caches: "ExactCaches"
    kv_events: "KvEvents"
    tokenization: "Tokenization"


class ExactMode:
    """Builds its parts when they are first needed, and runs them inside the block of `running`.

    The owner calls the methods named after changes of the fleet.
    """

    def __init__(
        self,
        models: ModelsConfig,
        fleet: Fleet,
        cache_state: CacheState,
        *,
        clock: Callable[[], float],
        supervisor: Supervisor,
    ) -> None:
        self._models = models
        self._fleet = fleet
        self._cache_state = cache_state
        self._clock = clock
        self._supervisor = supervisor
        self._index = ExactIndex()
        self.prompts = ExactPrompts(fleet, self._index)
        self._parts: ExactParts | None = None
        self._needed = asyncio.Event()  # set once there are parts
        self.apply(models)

    def build(self) -> ExactParts:
        """The parts; their modules are imported by the first call."""
        if self._parts is None:
            from gateway.features.exact.caches import ExactCaches
            from gateway.features.exact.feed import KvEvents
            from gateway.features.exact.tokenization import Tokenization

            clock, supervisor = self._clock, self._supervisor
            caches = ExactCaches(self._index, self._fleet, self._cache_state)
            kv_events = KvEvents(caches, caches.engine_number, clock, supervisor=supervisor)
            tokenization = Tokenization(self._models, self._fleet, clock, supervisor=supervisor)
            self._cache_state.use(caches)
            self.prompts.use(tokenization)
            self._parts = ExactParts(caches, kv_events, tokenization)
            self._needed.set()
        return self._parts

    def running(self) -> AbstractAsyncContextManager[None]:
        """Follow events and run tokenizers inside this block, from when they are needed on."""
        return self._supervisor.repeating("exact", self._run, _RETRY_SECONDS)

    async def _run(self) -> None:
        await self._needed.wait()
        parts = self.build()
        async with parts.tokenization, parts.kv_events:
            await asyncio.get_running_loop().create_future()  # until it is cancelled

    def apply(self, models: ModelsConfig) -> None:
        """Take over the tokenizers of another configuration."""
        self._models = models
        if self._parts is not None:
            self._parts.tokenization.apply(models)
        elif any(model.tokenizer for model in models.by_name.values()):
            self.build()

    def fleet_changed(self) -> None:
        """There are backends to compare tokenizers with, maybe."""
        if self._parts is not None:
            self._parts.tokenization.look_again()

    def facts_changed(self) -> None:
        """Follow the KV events that backends now say they publish."""
        for backend in self._fleet.backends:
            self._follow_events(backend, plan(backend).sources)

    def restarted(self, backend: Backend) -> None:
        """Compare tokens again: another process answers there, with another cache."""
        if self._parts is not None:
            self._parts.tokenization.forget(backend)
            self._parts.kv_events.restarted(backend.name)

    def left(self, backend: Backend) -> None:
        """Its engines are gone; another backend may have its name by now."""
        if self._parts is not None:
            self._parts.caches.left(backend)
            self._parts.tokenization.left(backend)
        if backend.name not in self._fleet.by_name:
            self._follow_events(backend, ())

    def _follow_events(self, backend: Backend, sources: tuple[Source, ...]) -> None:
        if sources or self._parts is not None:
            self.build().kv_events.subscribe(backend.name, sources)

    @property
    def tokenized(self) -> Container[str]:
        """The models whose prompts can be tokenized."""
        parts = self._parts
        return parts.tokenization if parts is not None and parts.tokenization.is_used else ()

    def complete(self, request: InferenceRequest) -> Awaitable[InferenceRequest]:
        """The request with the keys of its prompt's tokens, and without its document."""
        return self.prompts.complete(request)

    def covers(self, engine: int) -> bool:
        """Whether hits on an engine are predicted from its KV events alone."""
        return self.prompts.covers(engine)

    def configured(self, model: str) -> bool:
        """Whether this model has a tokenizer, so that `count` may be called."""
        return self._parts is not None and self._parts.tokenization.configured(model)

    def counts_alike(self, model: str, backend: str) -> bool:
        """Whether this backend was verified to count the tokens of embedded texts alike."""
        return self.build().tokenization.counts_alike(model, backend)

    async def count(self, model: str, texts: list[str], size_bytes: int, *, special: bool) -> "list[int] | NotCounted":
        """The number of tokens of each text on backends that count alike, in bounded time."""
        return await self.build().tokenization.count(model, texts, size_bytes, special=special)

    # For operators.

    def tokenized_prompts(self) -> dict[str, int]:
        """Prompts since the start, by result."""
        return dict.fromkeys(RESULTS, 0) if self._parts is None else self._parts.tokenization.totals

    def verdicts(self, backend: str) -> dict[str, dict[str, Any]]:
        """How this backend's tokens compare, by model."""
        return {} if self._parts is None else self._parts.tokenization.verdicts(backend)

    def streams(self) -> list[dict[str, Any]]:
        """The streams of KV events, and whether placement uses their reports."""
        streams = [] if self._parts is None else self._parts.kv_events.status()
        return [each | {"used": self._index.live(each["engine"])} for each in streams]
