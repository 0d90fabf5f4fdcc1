"""One client's request while its inputs travel with those of others."""

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

from gateway.embeddings.answer import Vectors
from gateway.embeddings.part import Part
from gateway.errors import GatewayError
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest


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
