# ruff: noqa: ARG002 - defaults use nothing of what they are given
"""The seam between the core and its features: what a feature can give. All of it is optional.

The core never imports a feature. `features/table.py` lists them; the composition root builds those that the
configuration uses, and puts what they give where the core asks for it. docs/adding-a-feature.md has an example.
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
        """Whether this backend was verified to count the tokens of embedded texts alike."""

    async def count(self, model: str, texts: list[str], size_bytes: int, *, special: bool) -> list[int] | str:
        """The tokens of each text, or why they are not known."""


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
    """What only one process may have open at a time."""

    async def open(self) -> None: ...

    async def stop(self) -> None: ...


class Feature:
    """One feature of a gateway. Each method is called once, by the composition root, but for those of a reload."""

    # The client port.

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        """Endpoints, by method and path; `{id}` in a path stands for any id."""
        return {}

    def apis(self) -> Mapping[str, LocalApi]:
        """What answers requests without a backend, by `Route.answered_by`."""
        return {}

    def sources(self) -> Mapping[str, RequestSource]:
        """What reads requests whose body is no JSON, by `Route.source`."""
        return {}

    def dispatchers(self) -> Mapping[str, RequestDispatcher]:
        """What sends requests in another way than one by one, by `InferenceRequest.dispatcher`."""
        return {}

    def works(self, config: Config) -> Mapping[str, WorkReader]:
        """What reads the bodies of requests for these dispatchers, by endpoint."""
        return {}

    def names(self, config: Config) -> ModelNames | None:
        """The models that names of clients stand for; None = as the core knows them."""
        return None

    def prompts(self) -> Prompts | None:
        """What knows the tokens of prompts."""
        return None

    def store(self) -> ResponseStore | None:
        """What knows where responses are stored."""
        return None

    def samples(self) -> PromptSamples | None:
        """What samples prompts; None = nothing does at present."""
        return None

    def traces(self) -> TraceSource | None:
        """What decides which requests are traced; None = none is at present."""
        return None

    # Requests that ended. Asked again after each reload, and when keys change.

    def consumers(self) -> Iterable[Callable[[Record], None]]:
        """Each of these gets every record, one by one; none at present = none is read."""
        return ()

    def batch_consumers(self) -> Iterable[Callable[[list[Record]], None]]:
        """Each gets the records of many requests at a time."""
        return ()

    # Operators.

    def admin_routes(self) -> Iterable[web.RouteDef]:
        return ()

    def origins(self) -> Iterable[str]:
        """The names of the sources of backends that it has at present."""
        return ()

    def add_gauges(self, metrics: Metrics) -> None:
        """Register metrics besides those of requests."""

    # The life of the process.

    def exclusive(self) -> Exclusive | None:
        """What a process that takes over opens once this one has stopped it."""
        return None

    def read_ahead(self, config: Config) -> None:
        """In a thread: read the files of a configuration that will be applied. Raises ConfigError."""

    def apply(self, config: Config) -> None:
        """Take over another configuration. Requests in flight are not disturbed."""

    def read_with(self, config: Config, reader: RequestReader) -> None:
        """Read requests by this configuration from now on; called at the start, too."""

    def running(self) -> AbstractAsyncContextManager[Any]:
        """The block within which the gateway runs, from before its backends are asked."""
        return nullcontext()

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """The block within which the gateway serves, from after a process before it has given way."""
        return nullcontext()
