"""Responses that their engine continues after the answer (`background: true`): each keeps its lease until its end.

vLLM answers such a request immediately, or as a stream which continues without its client, and generates in any case.
So the lease outlives the request: the gateway polls the response's status at intervals that grow with its age.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import orjson
import structlog

from gateway.config import UpstreamConfig
from gateway.core.backends.backend import Backend
from gateway.core.dispatch import Send
from gateway.core.errors import GatewayError
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.relay.upstream import read_usage
from gateway.core.request import BackgroundRun, Demand, InferenceRequest, Kind, UpstreamResult, Usage
from gateway.core.scheduling.leases import KeptLease, LeaseBroker
from gateway.core.scheduling.scheduler import Lease
from gateway.core.supervisor import Supervisor

_RUNS = ("queued", "in_progress")
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 10.0  # between two questions about one response
_SHARE = 0.1  # of its age: how much longer than needed it may hold its lease
_QUESTIONS_PER_SECOND = 50.0  # about all responses
_ANSWER_SECONDS = 10.0
_MAX_FAILURES = 5  # questions in a row without an answer
_MAX_BYTES = 4194304  # of an unfinished response; only the output makes one longer
_ANY_TOKENS = 1 << 30


class _Response:
    """One response in the background. `looks` is set for an immediate poll of its status. `record`: of its usage."""

    def __init__(
        self, request: InferenceRequest, background: BackgroundRun, backend: Backend, *, kept: KeptLease, record: Record
    ) -> None:
        self.request = request
        self.record = record
        self.background = background
        self.backend = backend
        self.kept = kept
        self.looks = asyncio.Event()
        self.failures = 0  # questions in a row without an answer
        self._questions = 0
        self.task: asyncio.Task[None] | None = None

    def run(self, holding: Coroutine[Any, Any, None]) -> None:
        """Hold the lease in a task of its own."""
        self.task = asyncio.get_running_loop().create_task(holding, name="background_response")

    def next_question(self) -> str:
        """The request id of the next question about its status."""
        self._questions += 1
        return f"{self.request.request_id}.{self._questions}"

    def asked(self, *, is_answered: bool) -> None:
        """A question has been answered, or has failed."""
        self.failures = 0 if is_answered else self.failures + 1


class BackgroundResponses:
    """Owner of the leases of background responses. `over` gets the record of each, once, with its usage."""

    def __init__(
        self,
        lease_broker: LeaseBroker,
        send: Send,
        *,
        config: UpstreamConfig,
        clock: Callable[[], float],
        supervisor: Supervisor,
        over: Callable[[Record], None],
    ) -> None:
        self._over = over
        self._lease_broker = lease_broker
        self._send = send
        self._clock = clock
        self._supervisor = supervisor
        self._running: dict[str, _Response] = {}
        self._log = structlog.get_logger("gateway")
        self.apply(config)

    def __repr__(self) -> str:
        return f"<BackgroundResponses {len(self)} running>"

    def __len__(self) -> int:
        return len(self._running)

    def add_gauges(self, metrics: Metrics) -> None:
        text = "Responses that backends go on with after their answer, and that hold slots."
        metrics.gauge("gateway_background_responses", text, (), lambda: [((), len(self))])

    def apply(self, config: UpstreamConfig) -> None:
        """Take over another limit, also for running responses."""
        self._most_seconds = config.background_timeout_seconds

    def keep(self, request: InferenceRequest, lease: Lease, backend: Backend, record: Record) -> None:
        """Take over the lease of a request whose attempt ends, if its engine has begun a response and continues."""
        run = request.background
        if run is None or not run.response_id or run.ended or run.response_id in self._running:
            return
        if record.completion_tokens:
            return  # the answer had the whole response
        response = _Response(request, run, backend, kept=self._lease_broker.keep(lease), record=record.go_on())
        self._running[run.response_id] = response
        response.run(self._hold(response))

    def look(self, response_id: str) -> None:
        """Ask for its status now: its client has cancelled it."""
        response = self._running.get(response_id)
        if response is not None:
            response.looks.set()

    async def all_over(self) -> None:
        """Wait until none runs, each up to its limit."""
        while tasks := [response.task for response in self._running.values() if response.task is not None]:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Release all leases. The engines go on."""
        await asyncio.sleep(0)  # a task that has not begun would not release its lease
        tasks = [response.task for response in self._running.values() if response.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(self, response: _Response) -> None:
        try:
            with self._supervisor.guard("background_response"), response.kept as lease:
                await self._until_over(response, lease)
        finally:
            del self._running[response.background.response_id]
            self._over(response.record)

    async def _until_over(self, response: _Response, lease: Lease) -> None:
        since = self._clock()
        while True:
            age_seconds = self._clock() - since
            if age_seconds >= self._most_seconds:
                name = response.backend.name
                self._log.warning("background_response_too_long", backend=name, held_seconds=round(age_seconds))
                return
            crowd_seconds = len(self._running) / _QUESTIONS_PER_SECOND
            pause_seconds = max(min(max(_SHARE * age_seconds, _LEAST_SECONDS), _MOST_SECONDS), crowd_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_seconds, self._most_seconds - age_seconds)):
                    await response.looks.wait()
            response.looks.clear()
            if await self._is_over(response, lease):
                return

    async def _is_over(self, response: _Response, lease: Lease) -> bool:
        """Poll the backend. A response is over if its backend does not know it, or is gone."""
        asked, answer = response.request, _Answer()
        target, model = b"/v1/responses/" + response.background.response_id.encode(), asked.demand.model
        name = response.next_question()
        demand = Demand(model, sequences=0, pinned=response.backend.name)
        headers = b"x-request-id: %b\r\n" % name.encode()
        question = InferenceRequest(
            asked.endpoint,
            Kind.LIGHT,
            method=b"GET",
            target=target,
            demand=demand,
            request_id=name,
            headers=headers,
        )
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._send(question, response.backend, answer, _ignore, _any_tokens)
        except (GatewayError, TimeoutError):
            response.asked(is_answered=False)
            return response.backend.health.gone or response.failures >= _MAX_FAILURES
        response.asked(is_answered=True)
        status, usage = answer.read()
        if status in _RUNS:
            return False
        found = UpstreamResult(200, usage, None)
        found.limit_usage(asked.demand, response.backend.context_tokens.get(asked.demand.model))
        if found.usage is not None:
            lease.on_usage(found.usage)
            response.record.answered(found.usage, None, lease.engine_index, client_was_slow=False)
        return True


def _ignore() -> None: ...


def _any_tokens(tokens: int) -> int:  # noqa: ARG001
    return _ANY_TOKENS


class _Answer:
    """A sink that keeps the answer to a question about a response, as much of it as is needed."""

    blocked = False
    chunked = False

    def __init__(self) -> None:
        self.begun = False
        self._status = 0
        self._body = bytearray()
        self._tail = b""

    def read(self) -> tuple[str, Usage | None]:
        """The status of the response, empty if none is stated; and its usage."""
        if self._status != 200:
            return "", None
        if len(self._body) > _MAX_BYTES:
            return "", read_usage(self._tail)
        try:
            document = orjson.loads(self._body)
        except orjson.JSONDecodeError:
            return "", None
        if not isinstance(document, dict):
            return "", None
        status, usage = document.get("status"), document.get("usage")
        return status if isinstance(status, str) else "", read_usage(orjson.dumps({"usage": usage}))

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        self.begin(status, content_type, extra)
        self.write(body)

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:  # noqa: ARG002
        self.begun = True
        self._status = status

    def write(self, data: bytes, framed: bool = False) -> bool:  # noqa: ARG002
        if len(self._body) <= _MAX_BYTES:
            self._body += data
        self._tail = (self._tail + data)[-4096:]
        return False

    def set_backend_headers(self, lines: bytes) -> None: ...

    def comment(self, blank_line: bool = True) -> None: ...

    def when_writable(self, resume: Callable[[], None] | None) -> None: ...

    def end(self) -> None: ...
