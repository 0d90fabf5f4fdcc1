"""One line of a batch as a request: the same reader and dispatchers as for a client's, and a record of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

from gateway.config import Config
from gateway.core.errors import BackendError, GatewayError, InternalError, KeyExpired, Unauthorized
from gateway.core.front.http_request import ClientKey, HttpRequest
from gateway.core.front.json_body import SHORT_BYTES, with_fields
from gateway.core.front.read import RequestReader
from gateway.core.front.reply import render
from gateway.core.front.routes import Route, find_route
from gateway.core.ledger import RequestLedger
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, UpstreamResult
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.turns import Steps, at_once, in_turns
from gateway.features.batches.batch import Owner
from gateway.features.batches.continuation import can_continue, continued_fields, saves_work, streamed
from gateway.features.batches.input import LineRequest
from gateway.features.batches.pace import BatchPace, OfflineLine
from gateway.features.batches.partial import PartialAnswer, StreamUnusable
from gateway.features.batches.sink import LineSink

_MOST_STREAMED_BYTES = 262144  # of a body: it is kept until the line has ended
_LINE_BYTES = 4096  # of an answer's line in its file, besides the body: a custom id has 512 characters
_PRIORITY = b"x-gateway-priority"


class LinePaused(Exception):
    """Interactive requests need what the line's request held; it is sent again when capacity is idle.

    `partial`: from where it is continued; None = from the start.
    """

    def __init__(self, partial: PartialAnswer | None) -> None:
        super().__init__()
        self.partial = partial


class LinesInFlight:
    """The requests of one batch's lines, and the pace of the batch."""

    def __init__(self, pace: BatchPace) -> None:
        self.pace = pace
        self._tasks: dict[Record, asyncio.Task[None]] = {}
        self._is_withdrawn = False

    @contextmanager
    def holding(self, record: Record) -> Iterator[None]:
        """While this block runs, its request can be withdrawn. Raises LinePaused if it was, or is too late."""
        if self._is_withdrawn:
            raise LinePaused(None)
        task = self._tasks[record] = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            yield
        except asyncio.CancelledError:
            if record in self._tasks or task.uncancel():
                raise
            raise LinePaused(None) from None
        finally:
            self._tasks.pop(record, None)

    def withdraw(self) -> None:
        """End the requests that wait for an engine: they are paused, and so is every later one."""
        self._is_withdrawn = True
        for record in [record for record in self._tasks if not record.is_placed]:
            self._tasks.pop(record).cancel()  # at once: none may get an engine in this turn


class LineDispatcher(Protocol):
    """As `front.reply.RequestDispatcher`, for any sink."""

    async def dispatch(self, request: InferenceRequest, reply: Any, record: Record) -> UpstreamResult:
        """Answer through `reply`, and write `record` on the way. Raises a GatewayError."""


class LineAnswer(NamedTuple):
    """A complete answer to a line: of a backend, or an error of the gateway."""

    status: int
    request_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SentLine:
    """What is sent of a line. `holding` has the memory of the request; that of the answer is to be added to it.

    `partial`: what is generated of its answer; `may_stream`: false = it is sent whole.
    """

    line: LineRequest
    _: KW_ONLY
    endpoint: str
    owner: Owner
    lines: LinesInFlight
    holding: Holding
    partial: PartialAnswer | None = None
    may_stream: bool = True


class LineSender:
    """Sends lines for the owners of batches. Their keys' permissions and budgets apply, their rate limits do not."""

    def __init__(
        self,
        dispatchers: Mapping[str, LineDispatcher],
        complete: Callable[[InferenceRequest], Awaitable[InferenceRequest]],
        *,
        ledger: RequestLedger,
        memory: MemoryBudget,
        clock: Callable[[], float],
        unix_seconds: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._dispatchers = dispatchers
        self._complete = complete
        self._ledger = ledger
        self._memory = memory
        self._clock = clock
        self._unix_seconds = unix_seconds
        self._new_id = new_id
        self._keys: dict[str, ClientKey] = {}
        self._has_keys = True  # until they are known
        self._idle_only = True
        self._unstreamed: set[str] = set()  # models whose backends answer lines whole, and refuse streams of them
        self._tenant_header = b""

    def apply(self, config: Config, reader: RequestReader) -> None:
        """Take over the reader of a configuration, for the next lines."""
        self._reader = reader
        self._server = config.server
        self._idle_only = config.batches.idle_only
        self._unstreamed.clear()
        self._tenant_header = config.admission.tenant_header.lower().encode()

    def apply_keys(self, keys: Sequence[ClientKey], are_needed: bool) -> None:
        """Take over the keys in effect, for the next lines."""
        self._keys, self._has_keys = {key.name: key for key in keys}, are_needed

    def now(self) -> float:
        return self._clock()

    async def send(self, sent: SentLine) -> LineAnswer:
        """The answer of a backend, whatever its status. Raises a GatewayError if there is none, or LinePaused.

        What can be continued after a pause is sent as a stream; if that fails for the stream, it is sent whole.
        """
        is_streamed = self._is_streamed(sent)
        if is_streamed:
            with suppress(StreamUnusable):
                answer = await self._send(sent, is_streamed=True)
                if answer.status < 400:
                    return answer
            sent.holding.release()
        answer = await self._send(sent, is_streamed=False)
        if is_streamed and answer.status < 400:
            self._unstreamed.add(sent.line.document["model"])
        return answer

    def _is_streamed(self, sent: SentLine) -> bool:
        line, document = sent.line, sent.line.document
        if not self._idle_only or not sent.may_stream or len(line.body) > _MOST_STREAMED_BYTES:
            return False
        if document["model"] in self._unstreamed or not can_continue(sent.endpoint, document):
            return False
        return sent.partial is not None or saves_work(document)

    async def _send(self, sent: SentLine, *, is_streamed: bool) -> LineAnswer:
        request_id, route = self._new_id(), find_route(b"POST", sent.endpoint.encode())
        body = streamed(sent.line.body, sent.line.document) if is_streamed else sent.line.body
        record = Record(request_id, route.endpoint, self._clock(), len(body), sent.owner.key)
        outcome = message = ""
        status = 0
        sink = LineSink(Holding(self._memory))
        try:
            sent.holding.add(len(body) + _LINE_BYTES)
            request = await self._request(sent, body, route, request_id)
            if is_streamed:
                request = _continued(request, sent, sink)
            await self._fetch(request, record, sink, sent.lines)
            status = sink.status
            whole = sink.whole()
            outcome = "completed" if status < 400 else "refused_by_backend"
            return LineAnswer(status, request_id, whole)
        except asyncio.CancelledError:
            outcome = "cut_by_shutdown"
            raise
        except LinePaused:
            outcome = "paused"
            raise
        except GatewayError as error:
            outcome, message, status = error.outcome, error.message, error.status
            raise
        except Exception as error:
            outcome, message, status = InternalError.outcome, type(error).__name__, InternalError.status
            raise
        finally:
            sink.close()
            record.ended(outcome, status, self._clock(), message)
            self._ledger.finished(record)

    async def _request(self, sent: SentLine, body: bytes, route: Route, request_id: str) -> InferenceRequest:
        """The request as if the owner had sent it. Raises what this would be refused with."""
        incoming = self._incoming(sent.endpoint, body, sent.owner)
        if len(body) <= SHORT_BYTES:
            request = self._reader.read(incoming, route, request_id, _no_model)
        else:
            request = await in_turns(self._reader.read_in_steps(incoming, route, request_id, _no_model))
        return request if request.document is None else await self._complete(request)

    def _incoming(self, endpoint: str, body: bytes, owner: Owner) -> HttpRequest:
        """The request as if the owner had sent it, in the class of batch requests. Raises Unauthorized."""
        incoming, headers = HttpRequest(), {_PRIORITY: b"batch"}
        if self._tenant_header and owner.tenant != owner.key:
            headers[self._tenant_header] = owner.tenant.encode()
        incoming.take_whole(b"POST", endpoint.encode(), headers, body)
        incoming.admit((lambda _: self._key_of(owner)) if self._has_keys else None, self._server)
        incoming.arrived(self._clock())
        return incoming

    def _key_of(self, owner: Owner) -> ClientKey:
        key = self._keys.get(owner.key)
        if key is None:
            raise Unauthorized("The API key that the batch was created with does not exist any more.")
        if key.expires_at is not None and key.expires_at.timestamp() <= self._unix_seconds():
            raise KeyExpired("The API key that the batch was created with has expired.")
        return key

    async def _fetch(self, request: InferenceRequest, record: Record, sink: LineSink, lines: LinesInFlight) -> None:
        if self._idle_only:
            pace = lines.pace
            line = OfflineLine(pace.expires_seconds, pace.laxity_seconds, sink.revoke, continues=sink.continues)
            request = _as_line(request, line)
        record.parsed(request.demand, request.demand.model)
        self._ledger.open_line(request, record)
        try:
            with lines.holding(record):
                async with sink.fetching:
                    await self._dispatchers[request.dispatcher].dispatch(request, sink, record)
        except TimeoutError:
            if sink.is_revoked and sink.error is None:
                raise LinePaused(sink.cut()) from None
            if sink.error is None:
                raise
        except GatewayError:
            if sink.error is None:
                raise
        if sink.error is not None:
            raise sink.error.again()


def _continued(request: InferenceRequest, sent: SentLine, sink: LineSink) -> InferenceRequest:
    """The request for a stream that is put together in `sink`: for the rest of an answer, if a part is there.

    A part is of the same model: another one has other token ids.
    """
    model, choice, partial = request.demand.model, request.model_choice, sent.partial
    continues = choice is None or not choice.fallbacks
    if partial is None or partial.model != model or not continues:
        partial = PartialAnswer(model, is_chat=request.endpoint == "chat", continues=continues)
    sink.expect_stream(partial)
    if not partial.tokens:
        return request
    document = sent.line.document
    body = at_once(with_fields(request.body, document, continued_fields(document, partial)))
    return replace(request, body=body, demand=_longer(request.demand, partial.tokens))


def _longer(demand: Demand, tokens: int) -> Demand:
    """A demand whose prompt has so many more tokens, which are no longer expected as output.

    Nothing is learned of the size of its text.
    """
    prompt, output = max(1, demand.prompt_tokens), demand.output_tokens
    return replace(
        demand,
        prompt_tokens=prompt + tokens,
        prompt_size=demand.prompt_size * (prompt + tokens) // prompt,
        learnable_bytes=0,
        generated_tokens=tokens,
        output_tokens=None if output is None else max(1, output - tokens),
    )


def _as_line(request: InferenceRequest, line: OfflineLine) -> InferenceRequest:
    """The request as an offline line, under whatever model."""
    request.demand.wait_offline(line)
    choice = request.model_choice
    if choice is None or (remade := choice.remade) is None:
        return request

    def remade_line(request: InferenceRequest, model: str) -> Steps[InferenceRequest]:
        return _as_line((yield from remade(request, model)), line)

    return replace(request, model_choice=replace(choice, remade=remade_line))


def _no_model() -> str | None:
    """Lines name their model: the check of the input file has seen to it."""
    return None


def error_answer(error: GatewayError, request_id: str) -> LineAnswer:
    """The error as a client would get it: the backend's own answer, if it has one."""
    answer = error.answer if isinstance(error, BackendError) else None
    body = bytes(answer.body) if answer is not None and answer.body else render(error)
    status = int(answer.status) if answer is not None else error.status
    return LineAnswer(status, request_id, body)
