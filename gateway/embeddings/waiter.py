"""One client's request while its pieces are in batches."""

import asyncio
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gateway.embeddings.delivery import BufferedResponse
from gateway.embeddings.rerank_wire import Scores
from gateway.embeddings.wire import Vectors
from gateway.errors import GatewayError
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest


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


@dataclass(frozen=True, slots=True)
class SendUnchanged:
    """The request is to be sent as it came. `isolated`: because a batch that it was part of was refused."""

    isolated: bool


Part = Vectors | Scores  # the answer to one piece
Outcome = SendUnchanged | BufferedResponse | list[Any]  # all parts in order, or a backend's refusal of a piece


class Waiter:
    """A request that is sent in pieces. `outcome` is set once; what comes later is ignored."""

    def __init__(self, request: InferenceRequest, record: Record, now: float) -> None:
        self.request = request
        self.record = record
        self.joined_seconds = now
        self.pieces: list[Piece] = []
        self.unsent = 0  # pieces that are in no batch yet
        self.whole = True  # it is sent in one piece
        self.passes_unread = False  # if it is alone, it may be sent as the client wrote it, and its answer passed on
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.backends: dict[str, None] = {}
        self._parts: dict[int, Part] = {}  # by where they begin
        self._timeout: asyncio.Timeout | None = None  # while no piece is in a batch

    def split(self, ranges: Sequence[range], tokens: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        """Its list is sent in these parts, which share no batch if there are several."""
        self.unsent, self.whole = len(ranges), len(ranges) == 1
        now, demand, alone = self.joined_seconds, self.request.demand, not self.whole
        for each in ranges:
            size_bytes, its_tokens = sum(sizes_bytes[each.start : each.stop]), sum(tokens[each.start : each.stop])
            piece = Piece(self, each.start, len(each), its_tokens, size_bytes, now, demand.tenant, demand.weight, alone)
            self.pieces.append(piece)

    def release(self) -> list[Piece]:
        """Drop its pieces: a piece and its owner must not keep each other in memory."""
        pieces, self.pieces = self.pieces, []
        return pieces

    async def wait(self, most_seconds: float) -> Outcome:
        """Raises TimeoutError if none of its pieces is in a batch in time."""
        async with asyncio.timeout(most_seconds) as self._timeout:
            return await self.outcome

    def piece_sent(self) -> None:
        """One of its pieces is in a batch now: its wait is over."""
        self.unsent -= 1
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(None)

    def batch_ended(self, record: Record, waited_seconds: float) -> None:
        """Note what is known of a batch with a piece of it, however it ended."""
        if record.backend:
            self.backends[record.backend] = None
        self.record.merge(record, waited_seconds)

    def answered(self, piece: Piece, part: Part) -> None:
        """One of its pieces has its answer; with the last of them, the request has its outcome."""
        if not self.outcome.done():
            self._parts[piece.start] = part
            if len(self._parts) == len(self.pieces):
                self.finish([self._parts[start] for start in sorted(self._parts)])

    def finish(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def failed(self, error: GatewayError) -> None:
        """It cannot be answered. Each waiter gets a copy of the error: errors are filled in on their way out."""
        if not self.outcome.done():
            self.outcome.set_exception(copy(error))
            self.outcome.exception()  # retrieved: after a disconnect, no other code does


class EmbeddingWaiter(Waiter):
    """An embeddings request. `client`: to whom a bad input is attributed."""

    def __init__(
        self, request: InferenceRequest, inputs: EmbeddingInputs, client: str, record: Record, now: float
    ) -> None:
        super().__init__(request, record, now)
        self.passes_unread = not inputs.wants_floats
        self.inputs = inputs
        self.client = client

    def vectors(self, parts: list[Vectors]) -> Vectors:
        data = list(chain.from_iterable(part.data for part in parts))
        tokens, exact = sum(part.prompt_tokens for part in parts), all(part.exact for part in parts)
        return Vectors(parts[-1].document, data, tokens, exact=exact)
