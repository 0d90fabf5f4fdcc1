"""One client's request while its inputs travel with others', its parts, and the bounds on what waits for a batch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gateway.embeddings.wire import Vectors
from gateway.errors import DeadlineUnmeetable, GatewayError, QueueFull, WaitExpired
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest
from gateway.scheduling.backlog import Backlog


@dataclass(slots=True, eq=False)
class Part:
    """Inputs `start` to `start + items` of one request. `owner` is told what came of it.

    `alone`: it shares its batch with nobody.
    """

    owner: Any
    start: int
    items: int
    tokens: int
    size_bytes: int
    tenant: str = ""
    weight: float = 1.0
    alone: bool = False
    joined_seconds: float = field(default=0.0)


@dataclass(frozen=True, slots=True)
class ByItself:
    """The request is to be sent as it came. `isolated`: because a batch that it was part of was refused."""

    isolated: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """What a backend answered to this request alone, and it is no vectors."""

    status: int
    content_type: bytes
    extra: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Served:
    """Every input has its vector."""

    document: dict[str, Any]
    data: list[dict[str, Any]]
    tokens: int
    exact: bool  # the tokens are this request's, and not its share of a batch's


Outcome = ByItself | Refused | Served


class Member:
    """Collects what comes of a request's parts. `outcome` is set once; later news are of no interest."""

    def __init__(
        self, request: InferenceRequest, inputs: EmbeddingInputs, client: str, record: Record, now: float
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.client = client
        self.record = record
        self.joined_seconds = now
        self.parts: list[Part] = []
        self.whole = True  # it is sent in one piece
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.waits: asyncio.Timeout | None = None  # while a part is in no batch
        self.on_taken: Callable[[Member], None] = lambda _: None  # told when every part is in a batch
        self.backends: dict[str, None] = {}
        self.attempts = 0
        self.queue_seconds = 0.0
        self.first_byte_seconds: float | None = None
        self._to_take = 0
        self._to_answer = 0
        self._data: list[dict[str, Any]] = []
        self._tokens = 0
        self._exact = True

    def __repr__(self) -> str:
        return f"<Member {self.request.request_id}, {len(self.parts)} parts, {self._to_answer} not answered>"

    @property
    def as_it_came(self) -> bool:
        """It can be sent as the client wrote it, if it is alone, and its answer be passed on unread."""
        return self.whole and not self.inputs.wants_floats

    def consists_of(self, parts: list[Part]) -> None:
        """Its inputs are sent like this."""
        self.parts = parts
        self.whole = len(parts) == 1
        self._to_take = self._to_answer = len(parts)
        self._data = [{}] * sum(part.items for part in parts)

    def leaves(self) -> list[Part]:
        """Release its parts: a part and its owner must not keep each other in memory."""
        parts, self.parts = self.parts, []
        return parts

    def taken(self) -> None:
        """One of its parts is in a batch now. With the last of them its time to wait for that is over."""
        self._to_take -= 1
        self.attempts = 1
        if self._to_take:
            return
        self.on_taken(self)
        if self.waits is not None and not self.waits.expired():
            self.waits.reschedule(None)

    def sent(self, record: Record, waited_seconds: float) -> None:
        """What is known of a batch with a part of it, however it ended."""
        if record.backend:
            self.backends[record.backend] = None
        self.attempts = max(self.attempts, record.attempts)
        self.queue_seconds = max(self.queue_seconds, waited_seconds + record.queue_seconds)
        if self.first_byte_seconds is None:
            self.first_byte_seconds = record.first_byte_seconds

    def tell_record(self) -> None:
        """Put down what is known of its batches."""
        record = self.record
        record.backend = next(iter(self.backends), "")
        record.attempts = self.attempts
        record.queue_seconds = self.queue_seconds
        record.first_byte_seconds = self.first_byte_seconds

    def answered(self, part: Part, vectors: Vectors, offset: int, tokens: int, *, exact: bool) -> None:
        """One of its parts has its vectors, which begin at `offset`."""
        if self.outcome.done():
            return
        self._data[part.start : part.start + part.items] = vectors.data[offset : offset + part.items]
        self._tokens += tokens
        self._exact = self._exact and exact
        self._to_answer -= 1
        if not self._to_answer:
            self.ends(Served(vectors.document, self._data, self._tokens, self._exact))

    def ends(self, outcome: Outcome) -> None:
        """Set its outcome, unless it has one."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def failed(self, error: GatewayError) -> None:
        """It cannot be answered. Each member has an error of its own, because errors are filled in on their way out."""
        if not self.outcome.done():
            self.outcome.set_exception(copy(error))
            self.outcome.exception()  # a client who has left does not ask for it


Who = TypeVar("Who")


class Waiting(Generic[Who]):
    """Owner of who waits here. `retry_after` tells when one who is refused may come again.

    `busy` says in words what keeps backends busy.
    """

    def __init__(
        self, backlog: Backlog, max_wait_seconds: float, retry_after: Callable[[str], float], busy: str
    ) -> None:
        self._backlog = backlog
        self._max_wait_seconds = max_wait_seconds
        self._retry_after = retry_after
        self._busy = busy
        self._sizes: dict[Who, int] = {}  # bytes of their requests

    def __len__(self) -> int:
        return len(self._sizes)

    def join(self, who: Who, request: InferenceRequest) -> None:
        self._sizes[who] = request.ask.size_bytes
        self._backlog.join(request.ask.size_bytes)

    def leave(self, who: Who) -> None:
        """Wait no more. Safe to call again."""
        size_bytes = self._sizes.pop(who, None)
        if size_bytes is not None:
            self._backlog.leave(size_bytes)

    def refuse_if_full(self, request: InferenceRequest) -> None:
        """Raises QueueFull where as many requests or bytes wait as may: ask before one that cannot go at once."""
        model, backlog = request.ask.model, self._backlog
        if backlog.is_full_for(request.ask.size_bytes, guarded=True):
            raise QueueFull(
                f"The queue is full: the backends for model {model!r} are busy with other {self._busy} and"
                f" {backlog.requests} requests are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=self._retry_after(model),
            )

    @asynccontextmanager
    async def in_time(self, request: InferenceRequest, since: float) -> AsyncIterator[asyncio.Timeout]:
        """Have the block done before its time to wait is over, or until the block says that it waits no more.

        `since`: when the wait began, on the gateway's clock. Raises WaitExpired or DeadlineUnmeetable.
        """
        model, deadline, most = request.ask.model, request.ask.deadline_seconds, self._max_wait_seconds
        kind: type[WaitExpired | DeadlineUnmeetable] = WaitExpired
        until = f"the queue timeout of {most:g} s"
        if deadline is not None and deadline - since < most:
            most, until, kind = deadline - since, "this request's deadline", DeadlineUnmeetable
        try:
            async with asyncio.timeout(most) as timeout:
                yield timeout
        except TimeoutError as error:
            raise kind(
                f"The backends for model {model!r} were busy with other {self._busy} until {until}.",
                retry_after_seconds=self._retry_after(model),
            ) from error
