"""One request to a backend: lease an engine, send the request, pass on the response, retry on another backend.

Retries depend on the kind of failure; a request is executed twice at most, and retries have a budget.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from gateway.config import UpstreamConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.errors import (
    BackendBusy,
    BackendDown,
    BackendError,
    ConnectFailed,
    ModelMissing,
    ModelNotFound,
    NoBackend,
    OutOfDescriptors,
    ReusedConnectionClosed,
)
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.request import SEVERAL_TENANTS, Demand, InferenceRequest, Sink, UpstreamResult
from gateway.core.routing.policy import EngineVerdict, as_header
from gateway.core.scheduling.scheduler import Broker, Lease, LeaseSource

MOST_EXECUTIONS = 2
_MAX_CONNECT_FAILURES = 3
_MAX_SAVED = 100.0  # requests with a kept fraction of a retry
_PAUSE_SECONDS = 1.0  # before a retry on the only backend


class RetryBudget:
    """Each request earns a fraction of a retry; a few are available from the start."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._minimum = self._tokens = 0.0
        self.apply(config)

    def apply(self, config: UpstreamConfig) -> None:
        """Take over another budget; spent retries still count."""
        self._fraction, minimum = config.retry_budget_fraction, float(config.retry_budget_min)
        self._ceiling = max(_MAX_SAVED * self._fraction, minimum)
        self._tokens = min(self._ceiling, max(0.0, self._tokens + minimum - self._minimum))
        self._minimum = minimum

    @property
    def left(self) -> float:
        """Retries that may be spent now."""
        return self._tokens

    @property
    def ceiling(self) -> float:
        """The most retries that are ever left."""
        return self._ceiling

    def earn(self) -> None:
        """A request was sent the first time."""
        self._tokens += self._fraction
        if self._tokens > self._ceiling:
            self._tokens = self._ceiling

    def spend(self) -> bool:
        """Take one retry; false if none is left."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Attempts:
    """The attempts of one request: which backends failed, and whether another attempt is allowed.

    A request is executed twice at most, even under several models: its record counts possible executions.
    """

    __slots__ = ("_budget", "_connect_failures", "_record", "_repeatable", "avoid", "fresh")

    def __init__(self, budget: RetryBudget, record: Record, repeatable: bool) -> None:
        self._budget = budget
        self._record = record
        self._repeatable = repeatable
        self._connect_failures = 0
        self.avoid: frozenset[str] = frozenset()
        self.fresh = False  # the next attempt needs a new connection
        budget.earn()

    @property
    def is_last(self) -> bool:
        """Whether the next execution is the last one."""
        return self._record.executions + 1 >= MOST_EXECUTIONS

    def allows(self, error: BackendError, backend: str, *, others: bool, waits: bool = False) -> bool:
        """Whether to retry after this failure, before the client has seen any of the answer.

        `others`: a backend that has not failed this request exists. `waits`: the request may wait for a backend to
        recover. A failed connect, a pooled connection that was closed, or a backend that is down is not caused by the
        request and does not use the budget.
        """
        may_recover = others or (waits and error.passing)
        is_race = isinstance(error, ReusedConnectionClosed)  # or a backend that stops: another one is safer
        if others or not is_race:
            self.avoid |= {backend}
        if isinstance(error, ConnectFailed):
            self._connect_failures += 1
            return waits or (may_recover and self._connect_failures <= _MAX_CONNECT_FAILURES)
        if not self._repeatable or not error.retryable or self._record.executions >= MOST_EXECUTIONS:
            return False
        self.fresh |= is_race
        return is_race or (may_recover and (isinstance(error, BackendDown) or self._budget.spend()))


class Send(Protocol):
    """Sends a request to a backend, and passes its answer on; see `Relay.send`."""

    def __call__(
        self,
        request: InferenceRequest,
        backend: Backend,
        sink: Sink,
        first_token: Callable[[], None],
        on_tokens: Callable[[int], int],
        *,
        rank: int | None = None,
        fresh: bool = False,
        last: bool = False,
    ) -> Awaitable[UpstreamResult]: ...


class Dispatcher:
    """Sends requests to backends, with retries."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        lease_broker: Broker,
        send: Send,
        budget: RetryBudget,
        metrics: Metrics,
        response_headers: bool,
        holds: bool = True,
    ) -> None:
        self._fleet = fleet
        self._lease_broker = lease_broker
        self._leases: LeaseSource = lease_broker
        self._send = send
        self._budget = budget
        self._metrics = metrics
        self._keep: Callable[[InferenceRequest, Lease, Backend, Record], None] | None = None
        self._response_headers = response_headers
        self._holds = holds

    def lease_from(self, leases: LeaseSource) -> None:
        """Take leases from there from now on."""
        self._leases = leases

    def keep_with(self, keep: Callable[[InferenceRequest, Lease, Backend, Record], None]) -> None:
        """Let this take over the leases of requests that their engines go on with after the answer."""
        self._keep = keep

    def apply(self, *, response_headers: bool, holds: bool) -> None:
        """Take over other settings, also for the next attempts of requests in flight."""
        self._response_headers, self._holds = response_headers, holds

    async def dispatch(self, request: InferenceRequest, reply: Sink, record: Record) -> UpstreamResult:
        """Answer the request through `reply`; `record` is filled in on the way.

        Raises a GatewayError if it cannot be answered; `reply.begun` is then true if the client has a part of the
        response. When cancelled, the backend request is aborted and everything reserved is released.
        """
        demand, attempts = request.demand, Attempts(self._budget, record, request.repeatable)
        since, waited = self._lease_broker.now(), 0.0  # since a backend last had the request
        keep_alive, choice = reply.comment if demand.streams else None, request.model_choice
        names, holds = (b"", True) if choice is None else (choice.headers(demand.model), not choice.fallbacks)
        while True:
            explains = request.explains or record.trace is not None
            explanation = self._explanation(request, attempts, record) if explains else b""
            with await self._leases.lease(demand, attempts.avoid, waited, keep_alive, holds) as lease:
                backend = self._fleet.owner(lease.engine_index)
                record.placed(demand.model, lease.backend, lease.waited_seconds, lease.hit_tokens)
                if self._response_headers:
                    reply.set_backend_headers(
                        b"x-gateway-backend: %b\r\nx-gateway-queue-ms: %.0f\r\nx-gateway-prefix-tokens: %d\r\n%b%b"
                        % (lease.backend.encode(), record.queue_seconds * 1000, lease.hit_tokens, names, explanation)
                    )
                # A rank that the client names wrongly is rejected by the backend, in the engine's words.
                rank = lease.rank if lease.rank is None or demand.rank is None else demand.rank
                try:
                    answer = await self._send(
                        request,
                        backend,
                        reply,
                        lease.on_first_token,
                        lease.on_tokens,
                        rank=rank,
                        fresh=attempts.fresh,
                        last=attempts.is_last,
                    )
                except BackendError as error:
                    self._failed(request, lease, backend, error=error, record=record)
                    others = self._others(demand, lease, attempts)
                    if not isinstance(error, ConnectFailed):
                        since = self._lease_broker.now()
                    waits = self._holds and self._lease_broker.now() - since < self._lease_broker.max_wait_seconds
                    if reply.begun or not attempts.allows(error, lease.backend, others=others, waits=waits):
                        raise
                    may_be_back = error.passing and not others and not backend.health.gone
                except OutOfDescriptors:
                    lease.on_failure()  # nothing was sent
                    raise
                except asyncio.CancelledError:
                    self._metrics.attempts.add((lease.backend, "cancelled"))
                    raise
                else:
                    return self._succeeded(request, lease, backend, answer, record)
                finally:
                    record.attempted(lease.first_token_seconds, lease.streamed_tokens, reply.begun)
                    if request.background is not None and self._keep is not None:
                        self._keep(request, lease, backend, record)
            if may_be_back:
                await self._lease_broker.change(_PAUSE_SECONDS)
            waited = self._lease_broker.now() - since
            if record.trace is not None:
                request = replace(request, headers=record.trace.retried(request.headers))

    def _explanation(self, request: InferenceRequest, attempts: Attempts, record: Record) -> bytes:
        """The header line x-gateway-explain, or nothing. The trace of the request gets the prices as well."""
        demand, verdicts = request.demand, list[EngineVerdict]()
        if demand.sequences:
            with suppress(NoBackend, ModelNotFound):  # the lease raises it as well
                verdicts = self._lease_broker.explain(demand, attempts.avoid)
        if record.trace is not None:
            record.trace.asks(verdicts)
        if not (request.explains and self._response_headers and verdicts):
            return b""
        return b"x-gateway-explain: %b\r\n" % as_header(verdicts)

    def _succeeded(
        self, request: InferenceRequest, lease: Lease, backend: Backend, answer: UpstreamResult, record: Record
    ) -> UpstreamResult:
        demand = request.demand
        lease.on_answer(answer)
        if request.background is not None and demand.streams:
            request.background.end()  # its stream ends with the response
        self._fleet.succeeded(backend, None if demand.tenant == SEVERAL_TENANTS else demand.tenant)
        self._metrics.attempts.add((lease.backend, "ok"))
        if answer.usage is not None and demand.sequences:  # a stored response repeats another request's usage
            plausible = answer.limit_usage(demand, backend.context_tokens.get(demand.model))
            record.answered(
                answer.usage, demand if plausible else None, lease.engine_index, client_was_slow=answer.client_was_slow
            )
            lease.on_usage(answer.usage)
        return answer

    def _failed(
        self, request: InferenceRequest, lease: Lease, backend: Backend, error: BackendError, record: Record
    ) -> None:
        demand = request.demand
        record.failed(error.result, ran=error.ran)
        self._fleet.failed(backend, error, None if demand.tenant == SEVERAL_TENANTS else demand.tenant)
        self._metrics.attempts.add((lease.backend, error.result))
        lease.on_failure()
        if isinstance(error, BackendBusy):
            error.retry_after(self._lease_broker.retry_after_seconds(demand.model))
        elif isinstance(error, ModelMissing):
            self._fleet.model_missing(backend, demand.model)

    def _others(self, demand: Demand, lease: Lease, attempts: Attempts) -> bool:
        """Whether another backend could take the request."""
        serving = self._fleet.serving(demand.model) or ()
        tried = attempts.avoid | {lease.backend}
        return demand.pinned is None and any(backend.name not in tried for backend in serving)
