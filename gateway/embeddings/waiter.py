"""One client's request while its pieces are in batches, and the bounds on what waits for a batch or a slot."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

from gateway.embeddings.delivery import BufferedResponse
from gateway.embeddings.fair_queue import Piece
from gateway.embeddings.wire import Vectors
from gateway.errors import DeadlineUnmeetable, GatewayError, QueueFull, WaitExpired
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest
from gateway.scheduling.backlog import Backlog


@dataclass(frozen=True, slots=True)
class SendUnchanged:
    """The request is to be sent as it came. `isolated`: because a batch that it was part of was refused."""

    isolated: bool


Outcome = SendUnchanged | BufferedResponse | Vectors  # a response is a backend's refusal of this request alone


class Waiter:
    """Collects the answers to a request's pieces. `outcome` is set once; what comes later is ignored."""

    def __init__(
        self, request: InferenceRequest, inputs: EmbeddingInputs, client: str, record: Record, now: float
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.client = client
        self.record = record
        self.joined_seconds = now
        self.pieces: list[Piece[Waiter]] = []
        self.whole = True  # it is sent in one piece
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.backends: dict[str, None] = {}
        self.attempts = 0
        self.queue_seconds = 0.0
        self.first_byte_seconds: float | None = None
        self._timeout: asyncio.Timeout | None = None  # while a piece is in no batch
        self._on_sent: Callable[[Waiter], None] = lambda _: None
        self._unsent = 0
        self._unanswered = 0
        self._data: list[dict[str, Any]] = []
        self._tokens = 0
        self._exact = True

    def __repr__(self) -> str:
        return f"<Waiter {self.request.request_id}, {len(self.pieces)} pieces, {self._unanswered} not answered>"

    @property
    def sendable_unchanged(self) -> bool:
        """It can be sent as the client wrote it, if it is alone, and its answer be passed on unread."""
        return self.whole and not self.inputs.wants_floats

    def split_into(self, pieces: "list[Piece[Waiter]]", on_sent: "Callable[[Waiter], None]" = lambda _: None) -> None:
        """Its inputs are sent in these pieces. `on_sent` is called when every piece is in a batch."""
        self.pieces = pieces
        self.whole = len(pieces) == 1
        self._on_sent = on_sent
        self._unsent = self._unanswered = len(pieces)
        self._data = [{}] * sum(piece.items for piece in pieces)

    def release(self) -> "list[Piece[Waiter]]":
        """Drop its pieces: a piece and its owner must not keep each other in memory."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def piece_sent(self) -> None:
        """One of its pieces is in a batch now. With the last of them its timeout ends."""
        self._unsent -= 1
        self.attempts = 1
        if self._unsent:
            return
        self._on_sent(self)
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(None)

    async def wait(self, waitlist: "Waitlist") -> Outcome:
        """Raises WaitExpired or DeadlineUnmeetable if one of its pieces is in no batch in time."""
        async with waitlist.place(self, self.request, self.joined_seconds, "embeddings") as self._timeout:
            try:
                return await self.outcome
            finally:
                self.fill_record()

    def batch_ended(self, record: Record, waited_seconds: float) -> None:
        """Note what is known of a batch with a piece of it, however it ended."""
        if record.backend:
            self.backends[record.backend] = None
        self.attempts = max(self.attempts, record.attempts)
        self.queue_seconds = max(self.queue_seconds, waited_seconds + record.queue_seconds)
        if self.first_byte_seconds is None:
            self.first_byte_seconds = record.first_byte_seconds

    def fill_record(self) -> None:
        """Copy what is known of its batches to its record."""
        backend = next(iter(self.backends), "")
        self.record.batched(backend, self.attempts, self.queue_seconds, self.first_byte_seconds)

    def answered(self, piece: "Piece[Waiter]", vectors: Vectors, offset: int, tokens: int, *, exact: bool) -> None:
        """One of its pieces has its vectors, which begin at `offset`."""
        if self.outcome.done():
            return
        self._data[piece.start : piece.start + piece.items] = vectors.data[offset : offset + piece.items]
        self._tokens += tokens
        self._exact = self._exact and exact
        self._unanswered -= 1
        if not self._unanswered:
            self.finish(Vectors(vectors.document, self._data, self._tokens, exact=self._exact))

    def finish(self, outcome: Outcome) -> None:
        """Set its outcome, unless it has one."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def failed(self, error: GatewayError) -> None:
        """It cannot be answered. Each waiter gets a copy of the error: errors are filled in on their way out."""
        if not self.outcome.done():
            self.outcome.set_exception(copy(error))
            self.outcome.exception()  # retrieved: after a disconnect, no other code does


class Waitlist:
    """Owner of the requests that wait here, within the bounds of all that waits.

    `retry_after` is the time in seconds after which a refused request may come again. In the errors, `work` is what
    keeps backends busy.
    """

    def __init__(self, backlog: Backlog, max_wait_seconds: float, retry_after: Callable[[str], float]) -> None:
        self._backlog = backlog
        self._max_wait_seconds = max_wait_seconds
        self._retry_after = retry_after
        self._sizes: dict[object, int] = {}  # bytes of their requests

    def __len__(self) -> int:
        return len(self._sizes)

    def join(self, waiter: object, request: InferenceRequest) -> None:
        self._sizes[waiter] = request.demand.size_bytes
        self._backlog.join(request.demand.size_bytes)

    def leave(self, waiter: object) -> None:
        """Safe to call again, also for one that never joined."""
        size_bytes = self._sizes.pop(waiter, None)
        if size_bytes is not None:
            self._backlog.leave(size_bytes)

    def refuse_if_full(self, request: InferenceRequest, work: str) -> None:
        """Raises QueueFull at the bound of requests or bytes: call before a request that cannot be sent at once."""
        model, backlog = request.demand.model, self._backlog
        if backlog.is_full_for(request.demand.size_bytes, guarded=True):
            raise QueueFull(
                f"The queue is full: the backends for model {model!r} are busy with other {work} and"
                f" {backlog.requests} requests are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=self._retry_after(model),
            )

    @asynccontextmanager
    async def place(
        self, waiter: object, request: InferenceRequest, since: float, work: str
    ) -> AsyncIterator[asyncio.Timeout]:
        """Wait in the block, in limited time; until it calls `leave`, and reschedules the timeout to None.

        `since`: when the wait began, on the gateway's clock. Raises WaitExpired or DeadlineUnmeetable.
        """
        self.join(waiter, request)
        model, deadline, most = request.demand.model, request.demand.deadline_seconds, self._max_wait_seconds
        kind: type[WaitExpired | DeadlineUnmeetable] = WaitExpired
        until = f"the queue timeout of {most:g} s"
        if deadline is not None and deadline - since < most:
            most, until, kind = deadline - since, "this request's deadline", DeadlineUnmeetable
        try:
            async with asyncio.timeout(most) as timeout:
                yield timeout
        except TimeoutError as error:
            raise kind(
                f"The backends for model {model!r} were busy with other {work} until {until}.",
                retry_after_seconds=self._retry_after(model),
            ) from error
        finally:
            self.leave(waiter)
