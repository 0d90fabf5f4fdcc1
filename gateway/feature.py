# ruff: noqa: ARG002 - the defaults ignore their arguments
"""The interface between the core and its features: everything a feature can provide, all of it optional.

The core never imports a feature. `features/table.py` lists them; the composition root builds those that the
configuration uses, and passes their parts to the core. docs/adding-a-feature.md has an example.
"""

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from aiohttp import web

from gateway.config import Config
from gateway.core.front.handler import LocalApi, RequestSource, TraceSource
from gateway.core.front.read import ModelNames, PromptSamples, RequestReader, ResponseStore, WorkReader
from gateway.core.front.reply import RequestDispatcher
from gateway.core.front.routes import Route
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest


class TokenCounter(Protocol):
    """Counts the tokens of texts, for models that have a tokenizer."""

    def configured(self, model: str) -> bool:
        """Whether this model has a tokenizer, so that `count` may be called."""

    def counts_alike(self, model: str, backend: str) -> bool:
        """Whether this backend was verified to count the tokens of embedded texts as this tokenizer does."""

    async def count(self, model: str, texts: list[str], size_bytes: int, *, special: bool) -> list[int] | str:
        """The tokens of each text, or the reason why they are unknown."""


class Prompts(TokenCounter, Protocol):
    """Knows the tokens of prompts, for models that have a tokenizer."""

    @property
    def tokenized(self) -> Container[str]:
        """The models whose prompts can be tokenized."""

    def complete(self, request: InferenceRequest) -> Awaitable[InferenceRequest]:
        """The request with the keys of its prompt's tokens, and without its document."""

    def covers(self, engine: int) -> bool:
        """Whether hits on an engine are predicted from its KV events alone."""


class Exclusive(Protocol):
    """A resource that only one process may have open at a time."""

    async def open(self) -> None: ...

    async def stop(self) -> None: ...


class Feature:
    """One feature of a gateway. The composition root calls each method once, and the methods of a reload repeatedly."""

    # The client port.

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        """Endpoints, by method and path; `{id}` in a path stands for any id."""
        return {}

    def apis(self) -> Mapping[str, LocalApi]:
        """Handlers of requests that need no backend, by `Route.answered_by`."""
        return {}

    def sources(self) -> Mapping[str, RequestSource]:
        """Readers of requests with a body other than JSON, by `Route.source`."""
        return {}

    def dispatchers(self) -> Mapping[str, RequestDispatcher]:
        """Dispatchers that do not send requests one by one, by `InferenceRequest.dispatcher`."""
        return {}

    def works(self, config: Config) -> Mapping[str, WorkReader]:
        """Readers of request bodies for these dispatchers, by endpoint."""
        return {}

    def names(self, config: Config) -> ModelNames | None:
        """Resolves clients' model names; None = the core's own rules."""
        return None

    def prompts(self) -> Prompts | None:
        """The source of token keys of prompts."""
        return None

    def store(self) -> ResponseStore | None:
        """The record of backends that store responses."""
        return None

    def samples(self) -> PromptSamples | None:
        """The sampler of prompts; None = sampling is off."""
        return None

    def traces(self) -> TraceSource | None:
        """Decides which requests are traced; None = tracing is off."""
        return None

    # Consumers of records. Read again after each reload, and when keys change.

    def consumers(self) -> Iterable[Callable[[Record], None]]:
        """Consumers that get every record, one by one; empty = none at present."""
        return ()

    def batch_consumers(self) -> Iterable[Callable[[list[Record]], None]]:
        """Consumers that get the records of many requests at a time."""
        return ()

    # Operators.

    def admin_routes(self) -> Iterable[web.RouteDef]:
        return ()

    def origins(self) -> Iterable[str]:
        """The names of the sources of backends that it has at present."""
        return ()

    def add_gauges(self, metrics: Metrics) -> None:
        """Register metrics other than the metrics of requests."""

    # The life of the process.

    def exclusive(self) -> Exclusive | None:
        """The resource that a successor opens once this process has closed it."""
        return None

    def read_ahead(self, config: Config) -> None:
        """In a thread: read the files of a configuration before it is applied. Raises ConfigError."""

    def apply(self, config: Config) -> None:
        """Take over another configuration. Requests in flight are not disturbed."""

    def read_with(self, config: Config, reader: RequestReader) -> None:
        """Read requests by this configuration from now on; also called at the start."""

    def running(self) -> AbstractAsyncContextManager[Any]:
        """The block within which the gateway runs, entered before the first probes."""
        return nullcontext()

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """The block within which the gateway serves, entered after its predecessor has given way."""
        return nullcontext()
