"""One line of a batch as a request: the same reader and dispatchers as for a client's, and a record of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from gateway.batches.batch import Owner
from gateway.config import Config
from gateway.config.keys import KeyConfig
from gateway.errors import BackendError, GatewayError, InternalError, KeyExpired, MemoryFull, Unauthorized, WrongAnswer
from gateway.front.http_request import HttpRequest
from gateway.front.json_body import SHORT_BYTES, in_turns
from gateway.front.read import RequestReader
from gateway.front.reply import render
from gateway.front.routes import Route, find_route
from gateway.observe.record import Record
from gateway.request import InferenceRequest, OfflineLine, UpstreamResult
from gateway.resources import Holding, MemoryBudget
from gateway.scheduling.offline import BatchPace

_MOST_ANSWER_BYTES = 67108864
_PRIORITY = b"x-gateway-priority"


class LinePaused(Exception):
    """Interactive requests need what the line's request held; it is sent again when capacity is idle."""


class LineDispatcher(Protocol):
    """As `front.uploads.RequestDispatcher`, for any sink."""

    async def dispatch(self, request: InferenceRequest, reply: Any, record: Record) -> UpstreamResult:
        """Answer through `reply`, and write `record` on the way. Raises a GatewayError."""


class LineAnswer(NamedTuple):
    """A complete answer to a line: of a backend, or an error of the gateway."""

    status: int
    request_id: str
    body: bytes


class LineDispatchers(NamedTuple):
    """What sends requests: alone, embeddings in batches with others', long lists in pieces, and to other models."""

    plain: LineDispatcher
    embeddings: LineDispatcher
    pairs: LineDispatcher
    fallbacks: LineDispatcher

    def of(self, request: InferenceRequest) -> LineDispatcher:
        if request.inputs is not None:
            return self.embeddings
        if request.model_choice is not None and request.model_choice.fallbacks:
            return self.fallbacks
        return self.plain if request.pairs is None else self.pairs


class LineSink:
    """Collects one whole answer, in memory that `holding` reserves. At the bound, `fetching` ends the request."""

    address = ""

    def __init__(self, holding: Holding) -> None:
        self.begun = self.chunked = False
        self.status = 0
        self.body = bytearray()
        self.error: GatewayError | None = None  # why no more is kept
        self.is_revoked = False
        self.fetching = asyncio.Timeout(None)
        self._holding = holding

    @property
    def blocked(self) -> bool:
        return False

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        self.begin(status, content_type, extra)
        self.write(body)

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:  # noqa: ARG002
        self.begun, self.status = True, status

    def write(self, data: bytes, framed: bool = False) -> bool:  # noqa: ARG002
        """Keep body bytes. True = no more are taken."""
        if self.error is None:
            try:
                if len(self.body) + len(data) > _MOST_ANSWER_BYTES:
                    raise WrongAnswer(f"The response exceeds the limit of {_MOST_ANSWER_BYTES} bytes.")
                self._holding.add(len(data))
            except (WrongAnswer, MemoryFull) as error:
                self.error = error
                self._end_request()
            else:
                self.body += data
        return self.error is not None

    def revoke(self) -> None:
        """End the request: its lease is revoked."""
        self.is_revoked = True
        self._end_request()

    def _end_request(self) -> None:
        if not self.fetching.expired():
            self.fetching.reschedule(asyncio.get_running_loop().time())

    def set_backend_headers(self, lines: bytes) -> None:
        """Dropped: the answer's headers are not kept."""

    def add_headers(self, lines: bytes) -> None:
        """Dropped: the answer's headers are not kept."""

    def comment(self) -> None:
        """Dropped: no client reads keep-alive comments here."""

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        """It is never full: at its bound, the request ends."""

    def end(self) -> None:
        """Nothing is left to do: the answer is read when the request has ended."""


class LineSender:
    """Sends lines for the owners of batches. Their keys' permissions apply, their rate limits do not."""

    def __init__(
        self,
        dispatchers: LineDispatchers,
        complete: Callable[[InferenceRequest], Awaitable[InferenceRequest]],
        finished: Callable[[Record], None],
        clock: Callable[[], float],
        unix_seconds: Callable[[], float],
        new_id: Callable[[], str],
        memory: MemoryBudget,
    ) -> None:
        self._dispatchers = dispatchers
        self._complete = complete
        self._finished = finished
        self._clock = clock
        self._unix_seconds = unix_seconds
        self._new_id = new_id
        self._memory = memory
        self._keys: dict[str, KeyConfig] = {}
        self._has_keys = True  # until they are known
        self._idle_only = True
        self._tenant_header = b""

    def follow(self, config: Config, reader: RequestReader) -> None:
        """Take over the reader of a configuration, for the next lines."""
        self._reader = reader
        self._server = config.server
        self._idle_only = config.batches.idle_only
        self._tenant_header = config.admission.tenant_header.lower().encode()

    def follow_keys(self, keys: Sequence[KeyConfig], *, are_needed: bool) -> None:
        """Take over the keys in effect, for the next lines."""
        self._keys, self._has_keys = {key.name: key for key in keys}, are_needed

    def now(self) -> float:
        return self._clock()

    async def send(self, endpoint: str, body: bytes, owner: Owner, pace: BatchPace) -> LineAnswer:
        """The answer of a backend, whatever its status. Raises a GatewayError if there is none, or LinePaused."""
        request_id, route = self._new_id(), find_route(b"POST", endpoint.encode())
        record = Record(request_id, route.endpoint, self._clock(), len(body), owner.key)
        outcome = message = ""
        status = 0
        try:
            with Holding(self._memory) as holding:
                holding.add(len(body))
                sink = LineSink(holding)
                await self._fetch(self._incoming(endpoint, body, owner), route, record, sink, pace)
                status = sink.status
                outcome = "completed" if status < 400 else "refused_by_backend"
                return LineAnswer(status, request_id, bytes(sink.body))
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
            record.ended(outcome, status, self._clock(), message)
            self._finished(record)

    def _incoming(self, endpoint: str, body: bytes, owner: Owner) -> HttpRequest:
        """The request as if the owner had sent it, in the class of batch requests. Raises Unauthorized."""
        incoming, headers = HttpRequest(), {_PRIORITY: b"batch"}
        if self._tenant_header and owner.tenant != owner.key:
            headers[self._tenant_header] = owner.tenant.encode()
        incoming.take_whole(b"POST", endpoint.encode(), headers, body)
        incoming.admit((lambda _: self._key_of(owner)) if self._has_keys else None, self._server)
        incoming.arrived(self._clock())
        return incoming

    def _key_of(self, owner: Owner) -> KeyConfig:
        key = self._keys.get(owner.key)
        if key is None:
            raise Unauthorized("The API key that the batch was created with does not exist any more.")
        if key.expires_at is not None and key.expires_at.timestamp() <= self._unix_seconds():
            raise KeyExpired("The API key that the batch was created with has expired.")
        return key

    async def _fetch(
        self, incoming: HttpRequest, route: Route, record: Record, sink: LineSink, pace: BatchPace
    ) -> None:
        request_id = record.request_id
        if len(incoming.body) <= SHORT_BYTES:
            request = self._reader.read(incoming, route, request_id, _no_model)
        else:
            request = await in_turns(self._reader.read_in_steps(incoming, route, request_id, _no_model))
        if request.document is not None:
            request = await self._complete(request)
        if self._idle_only and request.inputs is None and request.pairs is None:
            line = OfflineLine(pace.expires_seconds, pace.laxity_seconds, sink.revoke)
            request = replace(request, demand=replace(request.demand, batch=True, offline=line))
        record.parsed(request.demand, request.demand.model)
        try:
            async with sink.fetching:
                await self._dispatchers.of(request).dispatch(request, sink, record)
        except TimeoutError:
            if sink.is_revoked and sink.error is None:
                raise LinePaused from None
            if sink.error is None:
                raise
        except GatewayError:
            if sink.error is None:
                raise
        if sink.error is not None:
            raise sink.error


def _no_model() -> str | None:
    """Lines name their model: the check of the input file has seen to it."""
    return None


def error_answer(error: GatewayError, request_id: str) -> LineAnswer:
    """The error as a client would get it: the backend's own answer, if it has one."""
    answer = error.answer if isinstance(error, BackendError) else None
    body = bytes(answer.body) if answer is not None and answer.body else render(error)
    status = int(answer.status) if answer is not None else error.status
    return LineAnswer(status, request_id, body)
