"""One client's request while its pieces are in batches, and the answers of backends in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any, Protocol, Self

from gateway.core.errors import GatewayError, MemoryFull, WrongAnswer
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest, Sink, UpstreamResult
from gateway.core.resources import Holding
from gateway.features.embeddings.inputs import EmbeddingInputs
from gateway.features.embeddings.wire import Scores, Vectors

Dispatch = Callable[[InferenceRequest, Sink, Record], Awaitable[UpstreamResult]]  # as `Dispatcher.dispatch`


class ClientTarget(Sink, Protocol):
    """The response to one client."""

    @property
    def address(self) -> str: ...

    def add_headers(self, lines: bytes) -> None:
        """Header lines of the response, also of an error."""


class BufferedResponse:
    """Keeps one whole answer of at most `most_bytes`, in memory that `holding` reserves; a bound ends `fetch`."""

    blocked = False
    chunked = False

    def __init__(self, most_bytes: int, holding: Holding) -> None:
        self.begun = False
        self.status = 0
        self.content_type = b""
        self.headers = b""
        self.error: GatewayError | None = None  # why no more is kept; never raised itself
        self._fetching: asyncio.Timeout | None = None
        self._most_bytes = most_bytes
        self._holding = holding
        self._body = bytearray()

    def __repr__(self) -> str:
        return f"<BufferedResponse {self.status}, {len(self._body)} of at most {self._most_bytes} bytes>"

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    def send(self, status: int, content_type: bytes, extra: bytes, body: bytes) -> None:
        self.begin(status, content_type, extra)
        self.write(body)

    def begin(self, status: int, content_type: bytes, extra: bytes) -> None:
        self.begun = True
        self.status, self.content_type, self.headers = status, content_type, extra

    def comment(self, blank_line: bool = True) -> None:
        """Dropped: no client reads keep-alive comments here."""

    def write(self, data: bytes, framed: bool = False) -> bool:  # noqa: ARG002
        """Keep body bytes. True = no more are taken."""
        if self.error is not None:
            return True
        try:
            if len(self._body) + len(data) > self._most_bytes:
                raise WrongAnswer(f"The backend's response exceeds the limit of {self._most_bytes} bytes.")
            self._holding.add(len(data))
        except (WrongAnswer, MemoryFull) as error:
            self.error = error.again()
            if self._fetching is not None and not self._fetching.expired():
                self._fetching.reschedule(asyncio.get_running_loop().time())
            return True
        self._body += data
        return False

    def when_writable(self, resume: Callable[[], None] | None) -> None:
        """A full buffer ends the request: it is never writable again."""

    def set_backend_headers(self, lines: bytes) -> None:
        """The response to each client gets headers of its own."""

    def end(self) -> None: ...

    async def fetch(self, dispatch: Dispatch, request: InferenceRequest, record: Record) -> Self:
        """Itself, with the whole answer to a request. Raises WrongAnswer or MemoryFull, and aborts it, at the bound."""
        try:
            self._fetching = asyncio.Timeout(None)
            async with self._fetching:
                await dispatch(request, self, record)
        except (TimeoutError, GatewayError):
            if self.error is None:
                raise
        finally:
            self._fetching = None  # it has the task, and a cancelled task has the frames that hold this answer
        if self.error is not None:
            raise self.error.again()
        return self


@dataclass(slots=True, eq=False)
class Piece:
    """Inputs or documents `start` to `start + items` of one request. `alone`: it shares its batch with no other."""

    owner: "Waiter"
    start: int
    items: int
    tokens: int
    size_bytes: int
    joined_seconds: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    alone: bool = False


class SendUnchanged(Enum):
    """Mark the request to be sent unchanged."""

    ALONE = "alone"  # it is alone in its batch, whose place it keeps
    ISOLATED = "isolated"  # a batch that it was part of was refused


Part = Vectors | Scores  # the answer to one piece
Outcome = SendUnchanged | BufferedResponse | list[Any]  # all parts in order, or a backend's refusal of a piece


class Waiter:
    """A request that is sent in pieces. `outcome` is set once; later results are ignored."""

    def __init__(self, request: InferenceRequest, record: Record, now: float) -> None:
        self.request = request
        self.record = record
        self.joined_seconds = now
        self.pieces: list[Piece] = []
        self.unsent = 0  # pieces that are in no batch yet
        self.whole = True  # it is sent in one piece
        self.passes_unread = False  # if it is alone, it may be sent as the client wrote it, and its answer passed on
        self.expiry: asyncio.TimerHandle | None = None  # while no piece is in a batch
        self.outcome: asyncio.Future[Outcome | GatewayError] = asyncio.get_running_loop().create_future()
        self.backends: dict[str, None] = {}
        self._parts: dict[int, Part] = {}  # by where they begin

    def split(self, ranges: Sequence[range], tokens: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        """Its list is sent in these parts, which share no batch if there are several."""
        self.unsent, self.whole = len(ranges), len(ranges) == 1
        now, demand, alone = self.joined_seconds, self.request.demand, not self.whole
        for each in ranges:
            start, stop, items = each.start, each.stop, len(each)
            of_it, size_bytes = sum(tokens[start:stop]), sum(sizes_bytes[start:stop])
            self.pieces.append(Piece(self, start, items, of_it, size_bytes, now, demand.tenant, demand.weight, alone))

    def release(self) -> list[Piece]:
        """Drop its pieces: a piece and its owner must not keep each other in memory."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def batch_ended(self, record: Record, waited_seconds: float) -> None:
        """Note the facts of a batch with a piece of it, after any outcome."""
        if record.backend:
            self.backends[record.backend] = None
        self.record.merge(record, waited_seconds)

    def answered(self, piece: Piece, part: Part) -> None:
        """One of its pieces has its answer; with the last of them, the request has its outcome."""
        if self.outcome.done():
            return
        self._parts[piece.start] = part
        if len(self._parts) == len(self.pieces):
            self.outcome.set_result([self._parts[start] for start in sorted(self._parts)] if piece.alone else [part])

    def finish(self, outcome: Outcome | GatewayError) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def failed(self, error: GatewayError) -> None:
        """It cannot be answered. Each waiter gets a copy of the error: errors are filled in on their way out."""
        self.finish(error.again())


class EmbeddingWaiter(Waiter):
    """An embeddings request. Bad inputs are attributed to `client`."""

    def __init__(
        self, request: InferenceRequest, inputs: EmbeddingInputs, client: str, record: Record, now: float
    ) -> None:
        super().__init__(request, record, now)
        self.passes_unread = not inputs.wants_floats
        self.inputs = inputs
        self.client = client

    def vectors(self, parts: list[Vectors]) -> Vectors:
        if len(parts) == 1:
            return parts[0]
        data = list(chain.from_iterable(part.data for part in parts))
        tokens, exact = sum(part.prompt_tokens for part in parts), all(part.exact for part in parts)
        return Vectors(parts[-1].form, data, tokens, exact=exact)
