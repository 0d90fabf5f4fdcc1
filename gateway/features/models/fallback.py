"""Fallback models: another model generates the answer while a request's own model cannot.

A request changes its model once at most, before its client has a byte, and is never sent to more backends than without
fallbacks. If the other model cannot take it either, the client gets the error of the first one.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from gateway.core.backends.fleet import Fleet
from gateway.core.errors import (
    BackendError,
    ConnectFailed,
    DeadlineUnmeetable,
    EndpointNotOffered,
    GatewayError,
    ModelNotFound,
    NoBackend,
    QueueFull,
)
from gateway.core.front.reply import ClientResponse, RequestDispatcher
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest, ModelChoice, UpstreamResult
from gateway.core.turns import in_turns

_UNAVAILABLE = (QueueFull, DeadlineUnmeetable, NoBackend, ModelNotFound, EndpointNotOffered)
Complete = Callable[[InferenceRequest], Awaitable[InferenceRequest]]


def reason_for(error: GatewayError, request: InferenceRequest, executions: int, now: float, *, is_served: bool) -> str:
    """Why another model should take the place of the request's; empty = it should not.

    `executions`: how often a backend may have run the request; `is_served`: whether a backend still serves its model.
    """
    if isinstance(error, QueueFull):
        return "queue_full"
    if isinstance(error, DeadlineUnmeetable):
        deadline = request.demand.deadline_seconds
        return "deadline" if deadline is not None and now < deadline else ""
    if isinstance(error, NoBackend | ModelNotFound):
        return "no_backend"
    if not isinstance(error, BackendError) or is_served:
        return ""
    may_repeat = request.repeatable and error.retryable and executions <= 1
    return "no_backend" if may_repeat or isinstance(error, ConnectFailed) else ""


class Fallbacks:
    """Sends requests that have `fallbacks`. `fell_back` is called with the two models and the reason."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: RequestDispatcher,
        complete: Complete,
        *,
        fell_back: Callable[[tuple[str, str, str]], None],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._complete = complete
        self._fell_back = fell_back
        self._clock = clock

    async def dispatch(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with fallbacks."""
        model = request.demand.model
        if not self._fleet.serving(model):
            other = None if self._fleet.will_serve(model) else self._first_served(request)
            if other is None:
                return await self._wait(request, reply, record)
            return await self._send_as(
                other,
                "no_backend",
                request=request,
                reply=reply,
                record=record,
                error=NoBackend.of(model, "at this moment"),
            )
        try:
            return await self._dispatcher.dispatch(request, reply, record)
        except GatewayError as error:
            is_served = bool(self._fleet.serving(model))
            reason = reason_for(error, request, record.executions, self._clock(), is_served=is_served)
            if reply.begun or not reason:
                raise
            wakes = reason == "no_backend" and self._fleet.will_serve(model)
            other = None if wakes else self._first_served(request)
            if other is not None:
                return await self._send_as(other, reason, request=request, reply=reply, record=record, error=error)
            if reason != "no_backend":
                raise
        return await self._wait(request, reply, record)

    def _first_served(self, request: InferenceRequest) -> str | None:
        choice = request.model_choice
        assert choice is not None
        return next((other for other in choice.fallbacks if self._fleet.serving(other)), None)

    async def _wait(self, request: InferenceRequest, reply: ClientResponse, record: Record) -> UpstreamResult:
        """Send it without fallbacks: it waits for a backend of its own model."""
        choice = request.model_choice
        alias = choice.alias if choice is not None else ""
        alone = replace(request, model_choice=ModelChoice(alias) if alias else None)
        return await self._dispatcher.dispatch(alone, reply, record)

    async def _send_as(
        self,
        other: str,
        reason: str,
        request: InferenceRequest,
        reply: ClientResponse,
        record: Record,
        error: GatewayError,
    ) -> UpstreamResult:
        """Send the request with another model. Raises `error` if that cannot take it."""
        choice, model = request.model_choice, request.demand.model
        assert choice is not None
        assert choice.remade is not None
        made = await in_turns(choice.remade(request, other))
        if made.document is not None:
            made = await self._complete(made)
        made = replace(made, model_choice=ModelChoice(choice.alias, fell_back_from=model))
        self._fell_back((model, other, reason))
        record.renamed(choice.alias, model)
        try:
            return await self._dispatcher.dispatch(made, reply, record)
        except _UNAVAILABLE as second:
            if reply.begun:
                raise
            raise error.again() from second
