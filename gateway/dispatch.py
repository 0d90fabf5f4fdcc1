"""The story of a request: a place on the best backend, the request sent there, the answer passed on, the place back."""

import asyncio
from typing import Protocol

from gateway.backends.fleet import Fleet
from gateway.errors import BackendBusy, BackendError, ConnectFailed, ModelMissing, NoBackend, OutOfDescriptors
from gateway.observe.metrics import Metrics
from gateway.observe.record import Record
from gateway.relay.relay import Relay
from gateway.relay.retry import Attempts, RetryBudget
from gateway.relay.sse import possible
from gateway.relay.upstream import Sink, UpstreamResult
from gateway.request import SEVERAL_TENANTS, InferenceRequest
from gateway.routing.policy import as_header
from gateway.scheduling.leases import Gate, Lease

_PAUSE_SECONDS = 1.0  # before the only backend there is is tried again


class ResponseTarget(Sink, Protocol):
    """Who is answered. `extra`: header lines that the answer gets from here."""

    extra: bytes


class Dispatcher:
    """Brings requests to backends."""

    def __init__(
        self,
        fleet: Fleet,
        gate: Gate,
        relay: Relay,
        budget: RetryBudget,
        metrics: Metrics,
        *,
        response_headers: bool,
        holds: bool = True,
    ) -> None:
        self._fleet = fleet
        self._gate = gate
        self._relay = relay
        self._budget = budget
        self._metrics = metrics
        self._response_headers = response_headers
        self._holds = holds

    async def dispatch(self, request: InferenceRequest, reply: ResponseTarget, record: Record) -> UpstreamResult:
        """Answer the request through `reply`; `record` is filled in on the way.

        Raises a GatewayError if it cannot be answered; `reply.begun` then tells whether the client has part of an
        answer. When cancelled, the backend's work is aborted and everything taken is given back.
        """
        attempts = Attempts(self._budget, repeatable=request.repeatable)
        since = self._gate.now()  # a backend last had it
        remind = reply.comment if request.ask.streams else None
        while True:
            told = self._explanation(request, attempts)
            waited = self._gate.now() - since
            with await self._gate.lease(request.ask, attempts.avoid, waited, remind) as lease:
                self._note(request, lease, reply, record, told)
                try:
                    answer = await self._relay.send(
                        request, lease.backend, reply, lease.first_token, lease.came,
                        rank=_rank(request, lease), fresh=attempts.fresh,
                    )  # fmt: skip
                except BackendError as error:
                    self._failed(request, lease, error)
                    others = self._others(request, lease, attempts)
                    if not isinstance(error, ConnectFailed):
                        since = self._gate.now()
                    waits = self._holds and self._gate.now() - since < self._gate.max_wait_seconds
                    if reply.begun or not attempts.allows(error, lease.backend, others=others, waits=waits):
                        raise
                    may_be_back = error.passing and not others and not self._relay.backend(lease.backend).health.gone
                except OutOfDescriptors:
                    lease.served_tokens = 0  # nothing was sent
                    raise
                except asyncio.CancelledError:
                    self._metrics.attempts.add((lease.backend, "cancelled"))
                    raise
                else:
                    self._succeeded(request, lease, answer, record)
                    return answer
                finally:
                    record.first_byte_seconds = lease.first_token_seconds
                    record.streamed_tokens = lease.came_tokens
            if may_be_back:
                await self._gate.change(_PAUSE_SECONDS)

    def _explanation(self, request: InferenceRequest, attempts: Attempts) -> str:
        """A header line for those who ask for it."""
        if not (request.explains and self._response_headers and request.ask.sequences):
            return ""
        try:
            verdicts = self._gate.explain(request.ask, attempts.avoid)
        except NoBackend:
            return ""
        return f"x-gateway-explain: {as_header(verdicts).decode()}\r\n"

    def _note(self, request: InferenceRequest, lease: Lease, reply: ResponseTarget, record: Record, told: str) -> None:
        record.model, record.backend = request.ask.model, lease.backend  # which may have been unknown until now
        record.attempts += 1
        record.queue_seconds += lease.waited_seconds
        record.predicted_hit_tokens = lease.hit_tokens
        if self._response_headers:
            reply.extra = (
                f"x-gateway-backend: {lease.backend}\r\n"
                f"x-gateway-queue-ms: {record.queue_seconds * 1000:.0f}\r\n"
                f"x-gateway-prefix-tokens: {lease.hit_tokens}\r\n{told}"
            ).encode()

    def _succeeded(self, request: InferenceRequest, lease: Lease, answer: UpstreamResult, record: Record) -> None:
        lease.answered = answer.status == 200
        self._fleet.succeeded(self._relay.backend(lease.backend), _tenant(request))
        self._metrics.attempts.add((lease.backend, "ok"))
        if lease.first_token_seconds is None:
            lease.first_token_seconds = answer.first_byte_seconds
        if told := answer.usage:
            context_tokens = self._relay.backend(lease.backend).context_tokens.get(request.ask.model)
            answer.usage = usage = possible(told, request.ask, context_tokens)
            record.prompt_tokens = usage.prompt_tokens
            record.completion_tokens = usage.completion_tokens
            record.actual_hit_tokens = usage.cached_tokens
            cached = usage.cached_tokens if usage.cached_tokens is not None else lease.hit_tokens
            lease.counted(usage.completion_tokens)
            lease.served_tokens = max(0, usage.prompt_tokens - cached) + usage.completion_tokens
            if usage is told:  # else nothing is to be learned of it
                record.ask, record.engine_index, record.usage = request.ask, lease.engine_index, usage
            record.held_up = answer.held_up

    def _failed(self, request: InferenceRequest, lease: Lease, error: BackendError) -> None:
        backend = self._relay.backend(lease.backend)
        self._fleet.failed(backend, error, _tenant(request))
        self._metrics.attempts.add((lease.backend, error.code or "failed"))
        lease.served_tokens = 0  # what a backend has lost is not the tenant's
        if isinstance(error, BackendBusy):
            error.retry_after_seconds = self._gate.retry_after_seconds(request.ask.model)
        elif isinstance(error, ModelMissing):
            self._fleet.model_missing(backend, request.ask.model)

    def _others(self, request: InferenceRequest, lease: Lease, attempts: Attempts) -> bool:
        """Whether another backend could take the request."""
        serving = self._fleet.serving(request.ask.model) or ()
        tried = attempts.avoid | {lease.backend}
        return request.ask.pinned is None and any(backend.name not in tried for backend in serving)


def _tenant(request: InferenceRequest) -> str | None:
    """Whose request it is; None = not known."""
    tenant = request.ask.tenant
    return None if tenant == SEVERAL_TENANTS else tenant


def _rank(request: InferenceRequest, lease: Lease) -> int | None:
    """The engine to name to the backend: one that the client names wrongly is refused there, in the engine's words."""
    return lease.rank if lease.rank is None or request.ask.rank is None else request.ask.rank
