"""The record of one request, for metrics, the access log and learning: no prompts, no keys."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from gateway.core.request import Demand, Usage
from gateway.core.supervisor import Supervisor


class Verdict(Protocol):
    """One engine's suitability for a request. `parts`: of the cost; None = the policy's costs are not in seconds."""

    @property
    def name(self) -> str: ...

    @property
    def cost(self) -> float: ...

    @property
    def hit_tokens(self) -> int: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def parts(self) -> Any: ...


class Trace(ABC):
    """Notes the attempts of a traced request."""

    @abstractmethod
    def asks(self, verdicts: Sequence[Verdict]) -> None:
        """An attempt begins its search for an engine. `verdicts`: one for each engine, best first."""

    @abstractmethod
    def placed(self, backend: str, waited_seconds: float, hit_tokens: int) -> None:
        """The scheduler chose this backend, and the request is sent."""

    @abstractmethod
    def failed(self, kind: str) -> None: ...

    @abstractmethod
    def attempted(self, first_byte_seconds: float | None) -> None:
        """The attempt has ended, whether it succeeded or not."""

    @abstractmethod
    def retried(self, headers: bytes) -> bytes:
        """The header lines of the next attempt, which has a span of its own."""


class Record:
    """The history of one request. Times are seconds of the loop's clock; None = did not happen.

    Written only by its methods, in the order of the request's life. Defaults are class attributes: creating a record
    costs only the values that are set.
    """

    model: str = ""
    client: str = ""
    tenant: str = ""
    address: str = ""
    user_agent: bytes = b""
    traceparent: bytes = b""
    response_bytes: int = 0
    backend: str = ""
    outcome: str = ""
    status: int = 0
    attempts: int = 0
    executions: int = 0  # failed attempts that a backend may have executed
    streams: bool = False
    batch: bool = False
    is_placed: bool = False  # a backend has it now
    queue_seconds: float = 0.0
    first_byte_seconds: float | None = None
    ended_seconds: float = 0.0
    predicted_hit_tokens: int = 0
    actual_hit_tokens: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    streamed_tokens: int = 0  # a lower bound, also for a response that was cut short
    error: str = ""
    demand: Demand | None = None
    engine_index: int = 0
    usage: Usage | None = None
    alias: str = ""  # the client's name for the model, if it is another
    fell_back_from: str = ""  # the replaced model
    client_was_slow: bool = False  # backpressure: the client read its response more slowly than it came
    trace: Trace | None = None  # None = it is not traced
    requested: Demand | None = None  # None = it was refused before it was read
    has_begun: bool = False  # the client has a part of the backend's answer
    is_session: bool = False  # its tokens are counted as they come
    is_resent: bool = False  # if it is cut: nobody has a part of its answer
    upload_bytes: int = 0
    later: "Record | None" = None  # of the response with which the engine goes on after the answer

    def __init__(
        self, request_id: str, endpoint: str, arrived_seconds: float, request_bytes: int = 0, client: str = ""
    ) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.arrived_seconds = arrived_seconds
        self.request_bytes = request_bytes
        self.client = client

    def traced(self, trace: Trace) -> None:
        self.trace = trace

    def came_from(self, address: str, user_agent: bytes, traceparent: bytes) -> None:
        """Where the request came from, for the access log: the client's address and two of its headers."""
        self.address = address
        self.user_agent = user_agent
        self.traceparent = traceparent

    def sent(self, response_bytes: int) -> None:
        self.response_bytes = response_bytes

    def parsed(self, demand: Demand, model: str) -> None:
        """The request is valid; `model` is the label for metrics, which is not the client's text if it is unknown."""
        self.model = model
        self.requested = demand
        self.tenant = demand.tenant
        self.streams = demand.streams
        self.batch = demand.batch

    def renamed(self, alias: str, fell_back_from: str) -> None:
        """The gateway replaced the model that the client named."""
        self.alias, self.fell_back_from = alias, fell_back_from

    def waited(self, seconds: float) -> None:
        self.queue_seconds += seconds

    def placed(self, model: str, backend: str, waited_seconds: float, hit_tokens: int) -> None:
        """An attempt begins: the scheduler chose this backend and predicts a prefix-cache hit of this many tokens."""
        self.model = model  # the label until now, if the model was unknown
        self.backend = backend
        self.is_placed = True
        self.attempts += 1
        self.queue_seconds += waited_seconds
        self.predicted_hit_tokens = hit_tokens
        if self.trace is not None:
            self.trace.placed(backend, waited_seconds, hit_tokens)

    def attempted(self, first_byte_seconds: float | None, streamed_tokens: int, has_begun: bool = False) -> None:
        self.is_placed = False
        self.has_begun = has_begun
        self.first_byte_seconds = first_byte_seconds
        self.streamed_tokens = streamed_tokens
        if self.trace is not None:
            self.trace.attempted(first_byte_seconds)

    def failed(self, result: str, *, ran: bool) -> None:
        """An attempt failed with this result."""
        self.executions += ran
        if self.trace is not None:
            self.trace.failed(result)

    def answered(self, usage: Usage, demand: Demand | None, engine_index: int, *, client_was_slow: bool) -> None:
        """The response is complete, and the backend reported its usage; `demand` is None if estimates must not learn
        from it, because it was not plausible.
        """
        self.usage = usage
        self.demand = demand
        self.engine_index = engine_index
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens
        self.actual_hit_tokens = usage.cached_tokens
        self.client_was_slow = client_was_slow

    def merge(self, part: "Record", waited_seconds: float) -> None:
        """Add one of the request's pieces, which waited this long before its own record began."""
        self.backend = self.backend or part.backend
        self.attempts = max(self.attempts, part.attempts)
        self.queue_seconds = max(self.queue_seconds, waited_seconds + part.queue_seconds)
        if self.first_byte_seconds is None:
            self.first_byte_seconds = part.first_byte_seconds

    def restarted(self, queue_seconds: float) -> None:
        """The request is sent whole, after its batches or pieces were rejected or failed."""
        self.attempts = 0
        self.queue_seconds = queue_seconds

    def counted(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """The use of a request without a usage report: a part of a batch, or an estimate."""
        self.prompt_tokens, self.completion_tokens = prompt_tokens, completion_tokens

    def spent(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The use of a session so far, which may be zero."""
        self.counted(prompt_tokens, completion_tokens)
        self.is_session = True

    def uploaded(self, upload_bytes: int) -> None:
        self.upload_bytes = upload_bytes

    def will_be_resent(self) -> None:
        self.is_resent = True

    def go_on(self) -> "Record":
        """The engine goes on with the response after the answer. Returns the record that will have its tokens."""
        later = self.later = Record(self.request_id, self.endpoint, self.arrived_seconds, client=self.client)
        later.model, later.backend, later.attempts = self.model, self.backend, self.attempts
        later.requested, later.streamed_tokens, later.outcome = self.requested, self.streamed_tokens, "completed"
        return later

    def ended(self, outcome: str, status: int, now: float, error: str = "") -> None:
        """Called once, whatever happened; `status` is 0 if the client got no response."""
        self.outcome = outcome
        self.status = status
        self.ended_seconds = now
        self.error = error
        if self.model and not self.backend and outcome != "completed":
            self.queue_seconds = now - self.arrived_seconds  # it was queued and got no backend


_BATCH = 64
_Consumer = Callable[[Record], None]
_BatchConsumer = Callable[[list[Record]], None]


class RecordBatcher:
    """Passes each record to every consumer, 64 at a time or when `settle` is called: done in a row, the same work costs
    a third.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._consumers: list[_Consumer] = []
        self._batch_consumers: list[_BatchConsumer] = []
        self._present: tuple[list[_Consumer], list[_BatchConsumer]] = ([], [])
        self._records: list[Record] = []

    def consume(self, *consumers: _Consumer) -> None:
        """These get records one by one."""
        self._consumers.extend(consumers)

    def consume_all(self, *consumers: _BatchConsumer) -> None:
        """These get all records, in lists."""
        self._batch_consumers.extend(consumers)

    def consume_at_present(self, consumers: Iterable[_Consumer], batch_consumers: Iterable[_BatchConsumer]) -> None:
        """Replace the consumers of the last call; these first get the records collected until now."""
        self.settle()
        self._present = [*consumers], [*batch_consumers]

    def add(self, record: Record) -> None:
        self._records.append(record)
        if len(self._records) >= _BATCH:
            self.settle()

    def settle(self) -> None:
        """Pass on the collected records. An exception of one consumer for one record affects no other."""
        records, self._records = self._records, []
        if not records:
            return
        consumers, batch_consumers = self._present
        for consume_all in self._batch_consumers + batch_consumers:
            try:
                consume_all(records)
            except Exception as error:
                self._supervisor.caught("finished_requests", error)
        for consume in self._consumers + consumers:
            for record in records:
                try:
                    consume(record)
                except Exception as error:
                    self._supervisor.caught("finished_requests", error)
