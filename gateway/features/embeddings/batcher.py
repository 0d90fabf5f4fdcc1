"""Pieces of requests wait for batches, which are sent like any request, under the same rules.

Each client's request waits in its own task. Batches run in tasks of their own, because they outlive any one of their
waiters; a batch without waiters is aborted. Embeddings and lists of documents wait here together: they take a model's
slots in turn.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field

import structlog

from gateway.config import EmbeddingsConfig
from gateway.core import errors
from gateway.core.backends.fleet import Fleet
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest, UpstreamResult, Usage
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.scheduling.fair_share import Backlog
from gateway.features.embeddings.batching import (
    BatchKey,
    BatchKind,
    BatchReason,
    BulkSlots,
    ModelSizes,
    PendingBatch,
    SentBatch,
)
from gateway.features.embeddings.metrics import EmbeddingMetrics
from gateway.features.embeddings.waiter import (
    BufferedResponse,
    ClientTarget,
    Dispatch,
    Outcome,
    Piece,
    SendUnchanged,
    Waiter,
)

_JSON = b"application/json"
_WHOLE_BYTES = 1048576  # of an answer that is written in one piece


@dataclass(eq=False, repr=False)
class Batcher:
    """Owner of the pieces waiting for a batch, and of the batches in flight.

    `backlog` counts everything that waits, here or elsewhere; `crowded`: requests that wait for a model's backends;
    `retry_after`: the seconds until a refused request may be retried.
    """

    fleet: Fleet
    _: KW_ONLY
    dispatch: Dispatch
    config: EmbeddingsConfig
    backlog: Backlog
    max_wait_seconds: float
    retry_after: Callable[[str], float]
    metrics: EmbeddingMetrics
    clock: Callable[[], float]
    memory: MemoryBudget
    crowded: Callable[[str], int]
    response_headers: bool
    _present: int = field(init=False, default=0)  # requests
    _sizes: dict[tuple[BatchKind, str], ModelSizes] = field(init=False, default_factory=lambda: defaultdict(ModelSizes))
    _pending: dict[BatchKey, PendingBatch] = field(init=False, default_factory=dict)
    # by model, and apart for lines of offline batches: they wait for idle capacity with the slots that they took
    _bulk: dict[tuple[str, bool], BulkSlots] = field(init=False, default_factory=lambda: defaultdict(BulkSlots))
    _sent: set[SentBatch] = field(init=False, default_factory=set)
    _batch_of: dict[Piece, SentBatch] = field(init=False, default_factory=dict)  # of clients that still wait

    def __post_init__(self) -> None:
        self.fleet.on_change.append(self._forget_engines)
        self.fleet.on_limit.append(self._forget_engines)

    def apply(self, config: EmbeddingsConfig, max_wait_seconds: float, *, response_headers: bool) -> None:
        """Take over other settings. Waiting requests keep their time limit."""
        self.max_wait_seconds, self.response_headers = max_wait_seconds, response_headers
        if config != self.config:
            self.config = config
            for pending in self._pending.values():
                pending.apply(config)

    @property
    def busy(self) -> int:
        """Requests, batches, and slots of long lists; 0 when the batcher is at rest."""
        slots = sum(bulk.items for bulk in self._bulk.values())
        return self._present + len(self._pending) + len(self._batch_of) + len(self._sent) + slots

    async def stop(self) -> None:
        """Abort the batches in flight, and wait for their ends."""
        tasks = [batch.task for batch in self._sent if batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def sizes_of(self, kind: BatchKind, model: str) -> ModelSizes:
        """The estimates for a model, with the engines that serve it now, if any."""
        sizes = self._sizes[kind, model]
        if not sizes.knows_engines and (engines := self.fleet.candidates(model)):
            sizes.learn_engines(model, engines, self.fleet.serving(model) or ())
        return sizes

    def _forget_engines(self, *_: object) -> None:
        for sizes in self._sizes.values():
            sizes.forget_engines()

    def pending_for(self, request: InferenceRequest, key: BatchKey, kind: BatchKind) -> PendingBatch:
        """The batch that a request may join. Raises QueueFull if it would have to wait, and the queue is full."""
        sizes = self._sizes[kind, key.model]
        pending = self._pending.get(key) or PendingBatch(
            key, kind=kind, sizes=sizes, config=self.config, look=self._look
        )
        is_behind = key.bulk and (pending.next_items > 0 or self._slots_left(pending) < 1)
        has_to_wait = is_behind or pending.in_flight >= sizes.slots or self.crowded(key.model) > 0
        if has_to_wait and not key.offline and self.backlog.is_full_for(request.demand.size_bytes, guarded=True):
            raise errors.QueueFull(
                f"The queue is full: the backends for model {key.model!r} are busy with other {kind.work} and"
                f" {self.backlog.requests} requests are waiting. Retry after the time in the retry-after header.",
                retry_after_seconds=self.retry_after(key.model),
            )
        self._pending[key] = pending
        return pending

    async def join(self, pending: PendingBatch, waiter: Waiter) -> Outcome:
        """Send the pieces of a request. Must be followed by `leave`, which gives up unanswered pieces.

        Raises WaitExpired or DeadlineUnmeetable if none of them is in a batch in time, or the error of a batch.
        """
        if not waiter.whole:
            self.metrics.splits.add((pending.key.model,))
        self._present += 1
        demand, seconds = waiter.request.demand, self.max_wait_seconds
        if demand.offline is None:
            self.backlog.join(demand.size_bytes)  # until all of its pieces are sent
        else:
            seconds = demand.offline.expires_seconds - waiter.joined_seconds
        for piece in waiter.pieces:
            pending.join(piece)
        pending.look_soon()
        until_late = math.inf if demand.deadline_seconds is None else demand.deadline_seconds - waiter.joined_seconds
        is_late, seconds = until_late < seconds, min(seconds, until_late)
        loop = waiter.outcome.get_loop()
        waiter.expiry = loop.call_later(seconds, self._expire, waiter, pending.kind.work, seconds, is_late)
        outcome = await waiter.outcome
        if isinstance(outcome, errors.GatewayError):
            raise outcome.again()
        return outcome

    def leave(self, pending: PendingBatch, waiter: Waiter) -> None:
        """The client of a request stopped waiting."""
        self._present -= 1
        if waiter.unsent:
            waiter.stop_expiry()
            self._leave_backlog(waiter)
        for piece in waiter.release():
            if not pending.queue.leave(piece):
                self._leave(piece)
        pending.look_soon()

    def _leave_backlog(self, waiter: Waiter) -> None:
        """Lines of offline batches are not in it: they take no room from requests that wait."""
        if waiter.request.demand.offline is None:
            self.backlog.leave(waiter.request.demand.size_bytes)

    def _expire(self, waiter: Waiter, work: str, after_seconds: float, is_late: bool) -> None:
        model = waiter.request.demand.model
        until = "this request's deadline" if is_late else f"the queue timeout of {after_seconds:g} s"
        text = f"The backends for model {model!r} were busy with other {work} until {until}."
        kind = errors.DeadlineUnmeetable if is_late else errors.WaitExpired
        waiter.failed(kind(text, retry_after_seconds=self.retry_after(model)))

    async def fetch(
        self, batch: SentBatch, request: InferenceRequest, most_bytes: int, holding: Holding
    ) -> BufferedResponse:
        record = batch.begin_record(request)
        try:
            return await BufferedResponse(most_bytes, holding).fetch(self.dispatch, request, record)
        finally:
            for piece in batch.pieces:
                if piece in self._batch_of:
                    piece.owner.batch_ended(record, batch.sent_seconds - piece.joined_seconds)

    def set_headers(self, reply: ClientTarget, waiter: Waiter, others: str) -> None:
        """Header lines about the batches of a request, and `others`."""
        if self.response_headers:
            choice = waiter.request.model_choice
            if choice is not None:
                others += choice.headers(waiter.request.demand.model).decode()
            backend = f"x-gateway-backend: {','.join(waiter.backends)}\r\n" if waiter.backends else ""
            queue_ms = f"x-gateway-queue-ms: {waiter.record.queue_seconds * 1000:.0f}\r\nx-gateway-prefix-tokens: 0\r\n"
            reply.set_backend_headers(f"{backend}{queue_ms}{others}".encode())

    async def deliver(
        self,
        reply: ClientTarget,
        record: Record,
        tokens: int,
        parts: Iterator[bytes],
        *,
        size_bytes: int,
        held_bytes: int,
    ) -> UpstreamResult:
        """Write the answer to a request. A long one takes `held_bytes` of memory while the client reads it."""
        record.counted(tokens)
        if size_bytes <= _WHOLE_BYTES:
            reply.send(200, _JSON, b"", b"".join(parts))
        else:
            with Holding(self.memory) as holding:
                holding.add(held_bytes)
                await deliver_in_parts(reply, parts)
        return UpstreamResult(200, Usage(tokens, 0), record.first_byte_seconds)

    def _look(self, pending: PendingBatch) -> None:
        now, key = self.clock(), pending.key
        pending.looked()
        self.sizes_of(pending.kind, key.model)  # with the slots of now
        crowded = pending.has_next_calls if key.offline else self.crowded(key.model) > 0
        while reason := pending.due(now, crowded=crowded):
            left = self._slots_left(pending)
            if pending.next_items > left:
                return  # until slots come free
            batch = pending.take(now, left)
            self._start(batch, reason)
            if key.bulk:
                self._bulk[key.model, key.offline].take(pending, batch.items)
                if self._pending.get(key) is pending:
                    self._pending[key] = self._pending.pop(key)  # when slots come free, the others look first
                pending.look_soon()  # one a turn of the loop, because each writes a long body
                return
        if not pending.is_idle:
            pending.look_later(now)
        elif self._pending.get(key) is pending:  # and not another that has come since
            del self._pending[key]

    def _slots_left(self, pending: PendingBatch) -> float:
        """Items that a batch may have now: long lists leave some of the backends' slots to short ones."""
        key = pending.key
        return self._bulk[key.model, key.offline].left(pending, self._waiting_bulk(key)) if key.bulk else math.inf

    def _waiting_bulk(self, key: BatchKey) -> Iterator[PendingBatch]:
        """The batches that wait for the same bulk slots as this one."""
        for each in self._pending.values():
            if each.queue and each.key.bulk and (each.key.model, each.key.offline) == (key.model, key.offline):
                yield each

    def _start(self, batch: SentBatch, reason: BatchReason) -> None:
        """Send a batch. A single request in the form that backends are sent anyway is sent by its own task."""
        batch.pending.kind.observe(batch, reason)
        self._sent.add(batch)
        for piece in batch.pieces:
            self._batch_of[piece] = batch
            waiter = piece.owner
            waiter.stop_expiry()
            waiter.unsent -= 1
            if not waiter.unsent:
                self._leave_backlog(waiter)
        first = batch.pieces[0].owner
        if len(batch.pieces) == 1 and first.whole and first.passes_unread:
            first.finish(SendUnchanged.ALONE)
            return
        batch.run(self._run(batch), lambda task: self._done(task, batch))

    def _leave(self, piece: Piece) -> None:
        """The piece's client stopped waiting. A batch without waiting clients is aborted."""
        batch = self._batch_of.pop(piece, None)
        if batch is None:
            return
        if batch.record is not None:
            piece.owner.batch_ended(batch.record, batch.sent_seconds - piece.joined_seconds)
        batch.client_left()
        if not batch.clients and batch.task is None:
            self._end(batch)

    def _done(self, task: asyncio.Task[None], batch: SentBatch) -> None:
        """The batch is over: here, and not in its task, because a task cancelled early never runs."""
        batch.task = None  # a cancelled task holds the frames that hold the batch
        for piece in batch.pieces:
            self._batch_of.pop(piece, None)
            if task.cancelled():
                piece.owner.failed(errors.Draining("The gateway is shutting down."))  # clients that still wait
        self._end(batch)

    def _end(self, batch: SentBatch) -> None:
        """A batch is over: waiting pieces may be sent now."""
        self._sent.remove(batch)
        batch.pending.ended()
        if batch.key.bulk:
            self._bulk[batch.key.model, batch.key.offline].give_back(batch.items)
            for pending in self._waiting_bulk(batch.key):
                pending.look_soon()
        batch.pending.look_soon()

    async def _run(self, batch: SentBatch) -> None:
        refusal = await self._refusal(batch)
        if refusal is not None and len(batch.pieces) > 1:  # refused for its content, and any piece may be the cause
            self.metrics.isolations.add((batch.key.model,))
            await self._isolate(batch)
        elif refusal is not None:
            batch.pieces[0].owner.finish(refusal)

    async def _isolate(self, batch: SentBatch) -> None:
        """Find the bad pieces of a rejected batch by bisection, and answer the others.

        One bad piece costs a request for each halving, and one for all pieces outside these halves.
        """
        bad, rest, finds_first = [batch.pieces], list[Piece](), True
        while bad:
            refused = bad.pop()
            first, second = refused[: len(refused) // 2], refused[len(refused) // 2 :]
            if not first:
                second[0].owner.finish(SendUnchanged.ISOLATED)
            elif not await self._refuses(batch, first):
                bad.append(second)
            else:
                bad.append(first)
                if finds_first:
                    rest += second
                elif await self._refuses(batch, second):
                    bad.append(second)
            if not bad and rest:
                finds_first = False
                bad, rest = ([rest] if await self._refuses(batch, rest) else []), []

    async def _refuses(self, batch: SentBatch, some: list[Piece]) -> bool:
        """Whether a backend rejects these pieces of a batch; otherwise they are answered, or have failed."""
        some = [piece for piece in some if piece in self._batch_of]  # pieces whose clients still wait
        return bool(some) and await self._refusal(SentBatch(batch.pending, some, self.clock())) is not None

    async def _refusal(self, batch: SentBatch) -> BufferedResponse | None:
        """Send a batch and deliver its answer. Returns the backend's response if it rejected the content."""
        try:
            return await batch.pending.kind.answer(batch)
        except errors.GatewayError as error:
            if isinstance(error, errors.BackendError) and len(batch.pieces) > 1:
                error.answer = None  # its text may quote other clients' inputs
            self._failed(batch, error)
        except Exception as error:
            record, request = batch.record, batch.pieces[0].owner.request
            name = request.request_id if record is None else record.request_id
            structlog.get_logger("gateway").exception("internal_error", request_id=name, endpoint=request.endpoint)
            self._failed(batch, errors.InternalError(f"Internal error of the gateway ({type(error).__name__})."))
        return None

    def _failed(self, batch: SentBatch, error: errors.GatewayError) -> None:
        for piece in batch.pieces:
            piece.owner.failed(error)


async def deliver_in_parts(reply: ClientTarget, parts: Iterator[bytes]) -> None:
    """Write a long answer, which is produced as fast as the client reads it."""
    reply.begin(200, _JSON, b"")
    room = asyncio.Event()
    reply.when_writable(room.set)
    try:
        for part in parts:
            room.clear()
            if reply.write(part) and reply.blocked:
                await room.wait()
            else:
                await asyncio.sleep(0)
    finally:
        reply.when_writable(None)
    reply.end()
