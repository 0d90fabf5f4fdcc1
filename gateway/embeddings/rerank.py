"""Long rerank and score requests go to all replicas, piece by piece.

A piece is sent like any request, with a lease and retries of its own, and shares nothing with other clients' pieces.
Tenants take turns for a model's slots, and a quarter of the slots is kept for short requests. `Tasks` works like
`asyncio.TaskGroup`, which in Python 3.11 leaves the waiting task half cancelled after a failure.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from gateway.backends.fleet import Fleet
from gateway.config import EmbeddingsConfig
from gateway.dispatch import Dispatcher
from gateway.embeddings.batching import Lane
from gateway.embeddings.delivery import Collected, deliver
from gateway.embeddings.members import Part, Waiting
from gateway.embeddings.rerank_wire import (
    Counting,
    Scores,
    answer_pieces,
    body_of,
    counting_of,
    most_bytes,
    probes,
    query_body,
    read_scores,
    repeated_bytes,
    tokens_in,
)
from gateway.embeddings.sizes import BulkShares, ModelSizes
from gateway.embeddings.wire import pieces
from gateway.errors import BackendError, WrongAnswer
from gateway.front.reply import Reply
from gateway.observe.metrics import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.relay.upstream import UpstreamResult
from gateway.request import InferenceRequest, Pairs, Usage, most_prompt_tokens
from gateway.resources import Holding, MemoryBudget
from gateway.scheduling.backlog import Backlog


class PieceTurns:
    """The pieces of one list: iterating gives each when its slots are taken; `ended` gives them back."""

    def __init__(self, room: "PieceQueue", pieces: int) -> None:
        self._room = room
        self._due: asyncio.Queue[Part] = asyncio.Queue()
        self._left = pieces
        self._holds: set[Part] = set()

    async def __aiter__(self) -> AsyncIterator[Part]:
        while self._left:
            self._left -= 1
            yield await self._due.get()

    def come(self, part: Part) -> None:
        """Its slots have been taken for it."""
        self._holds.add(part)
        self._due.put_nowait(part)

    def ended(self, part: Part) -> None:
        """A piece needs its slots no more. Safe to call again."""
        if part in self._holds:
            self._holds.remove(part)
            self._room.give_back(part.items)

    def end(self) -> None:
        """None of its pieces needs its slots any more."""
        held, self._holds = self._holds, set()
        if held:
            self._room.give_back(sum(part.items for part in held))


class PieceQueue:
    """Owner of the pieces of one model that wait to be sent, or are under way.

    `follow` brings the sizes up to date. What engines may be given now counts, not what they could be given: a piece
    that waits behind others of its own list must wait here, because `max_wait_seconds` does not count here.
    """

    def __init__(self, sizes: ModelSizes, clock: Callable[[], float], follow: Callable[[], None]) -> None:
        self._sizes = sizes
        self._clock = clock
        self._follow = follow
        self._lane = Lane()

    def __repr__(self) -> str:
        return f"<PieceQueue {self._sizes.bulk!r}, {self._lane!r}>"

    @property
    def busy(self) -> int:
        """Pieces that wait, and documents under way."""
        return len(self._lane) + self._sizes.bulk.items

    @property
    def next_items(self) -> int:
        """Documents of the piece that comes next; 0 if none waits."""
        return self._lane.next_items

    @contextmanager
    def turns(self, parts: Sequence[Part]) -> Iterator[PieceTurns]:
        """Have the pieces of one list wait for their turns; with the block, all that they wait for or hold ends."""
        turns, now = PieceTurns(self, len(parts)), self._clock()
        for part in parts:
            part.owner = turns
            self._lane.join(part, now)
        try:
            self.look()
            yield turns
        finally:
            for part in parts:
                self._lane.leave(part)
            turns.end()
            self.look_soon()

    def give_back(self, items: int) -> None:
        self._sizes.bulk.give_back(items)  # which has all look

    @property
    def _share(self) -> int:
        """Slots that pieces may take now."""
        return self._sizes.total_limit - self._sizes.total_limit // 4

    def look_soon(self) -> None:
        """Look at the end of this turn of the loop, as others do: they would always be later."""
        asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Let those go for whom there is room now; one may always."""
        sizes, lane = self._sizes, self._lane
        if len(lane):
            self._follow()
        while len(lane) and sizes.bulk.may_take(lane.next_items, self._share):
            for part in lane.take(1, 1):
                sizes.bulk.take(part.items)
                part.owner.come(part)


Result = TypeVar("Result")


class Tasks:
    """Tasks, which may start others. Leaving the block waits for all; when one fails, the others are aborted."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._over = asyncio.Event()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.remove(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        if not self._running or self._failure is not None:
            self._over.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._running:
                await self._over.wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        if self._failure is not None:
            raise self._failure


_MOST_PIECES = 256  # of one request
_MOST_BYTES = 4  # times those of the request may go to the backends: each piece repeats the query
_NOTHING = Scores({}, [], 0, 0)  # until a piece is answered


class _RefusedError(Exception):
    """A backend refuses what a piece asks: the client is to hear that of its whole request."""


@dataclass(slots=True)
class _Model:
    """What is known of one model. `counting` is None until backends have told."""

    sizes: ModelSizes
    room: PieceQueue
    counting: Counting | None = None
    tries: int = 0
    trying: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Job:
    """One client's request in pieces. `repeats_query`: each of them counts the same query again."""

    def __init__(
        self,
        request: InferenceRequest,
        pairs: Pairs,
        record: Record,
        pieces: int,
        holding: Holding,
        *,
        repeats_query: bool,
    ) -> None:
        self.request = request
        self.pairs = pairs
        self.record = record
        self.holding = holding  # of what was answered
        self.repeats_query = repeats_query
        self.unsent = pieces
        self.waits: asyncio.Timeout | None = None  # until its first piece is sent
        self.scores: list[Scores] = [_NOTHING] * pieces
        self.query_tokens = 0  # if it is counted again
        self.backends: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<_Job {self.request.request_id}, {self.unsent} pieces not sent>"

    def sent(self) -> None:
        """One of its pieces has its turn: with the first its time to wait for that is over."""
        self.unsent -= 1
        if self.waits is not None and not self.waits.expired():
            self.waits.reschedule(None)

    def told(self, record: Record, waited_seconds: float) -> None:
        """What is known of one of its pieces, however it ended."""
        own = self.record
        if record.backend:
            self.backends[record.backend] = None
            own.backend = own.backend or record.backend
        own.attempts = max(own.attempts, record.attempts)
        own.queue_seconds = max(own.queue_seconds, waited_seconds + record.queue_seconds)
        if own.first_byte_seconds is None:
            own.first_byte_seconds = record.first_byte_seconds


class Spreader:
    """Answers rerank and score requests. Owner of those that are in pieces.

    `retry_after` tells when one who is refused may come again.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        config: EmbeddingsConfig,
        backlog: Backlog,
        max_wait_seconds: float,
        metrics: EmbeddingMetrics,
        clock: Callable[[], float],
        *,
        retry_after: Callable[[str], float],
        memory: MemoryBudget,
        bulk: BulkShares,
        response_headers: bool,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._memory = memory
        self._response_headers = response_headers
        self._bulk = bulk
        self._models: dict[str, _Model] = {}
        self._waiting: Waiting[_Job] = Waiting(  # those of whom not every piece is sent
            backlog, max_wait_seconds, retry_after, "lists of documents"
        )

    def __repr__(self) -> str:
        return f"<Spreader {len(self._waiting)} requests waiting, {self.busy} in all>"

    @property
    def busy(self) -> int:
        """Requests, pieces and documents that are there; nothing, when all is at rest."""
        return len(self._waiting) + sum(model.room.busy for model in self._models.values())

    def forget(self) -> None:
        """Backends may serve other models under the same names."""
        for model in self._models.values():
            model.counting = None

    async def dispatch(self, request: InferenceRequest, reply: Reply, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with `pairs`."""
        pairs = request.pairs
        assert pairs is not None
        if self._fleet.candidates(request.ask.model) and not request.explains:
            model = self._model(request.ask.model)
            parts = self._parts(request, pairs, model.sizes)
            counting = await self._counting_of(request, pairs, model) if parts else None
            if counting is Counting.PAIRS or counting is Counting.QUERY_ONCE:
                again = counting is Counting.QUERY_ONCE and pairs.share_query
                with Holding(self._memory) as holding:
                    job = _Job(request, pairs, record, len(parts), holding, repeats_query=again)
                    try:
                        await self._collect(job, model, parts)
                    except _RefusedError:
                        record.attempts = 0
                    else:
                        return await self._deliver(job, reply)
        return await self._dispatcher.dispatch(request, reply, record)

    # What is known of a model.

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            sizes = ModelSizes(self._bulk.of(name).joined(lambda: room.next_items, lambda: room.look_soon()))
            room = PieceQueue(sizes, self._clock, lambda: self._follow(name, sizes))
            model = self._models[name] = _Model(sizes, room)
        self._follow(name, model.sizes)
        return model

    def _follow(self, name: str, sizes: ModelSizes) -> None:
        if engines := self._fleet.candidates(name):
            sizes.learn_engines(name, engines, self._fleet.serving(name) or ())

    async def _counting_of(self, request: InferenceRequest, pairs: Pairs, model: _Model) -> Counting | None:
        """How the model counts, if backends tell. Who waits while others ask in vain does not ask again."""
        tries = model.tries
        async with model.trying:
            if model.counting is None and model.tries == tries:
                try:
                    model.counting = await self._probed(request, pairs)
                finally:
                    model.tries += 1
            return model.counting

    async def _probed(self, request: InferenceRequest, pairs: Pairs) -> Counting | None:
        """How the model counts; None if backends fail or refuse to tell."""
        try:
            with Holding(self._memory) as holding:
                async with Tasks() as tasks:
                    answers = [
                        tasks.start(self._send(request, holding, body, f"probe-{count}", count))
                        for count, body in enumerate(probes(request.ask.model, pairs), 1)
                    ]
            return counting_of(*(tokens_in(answer.result()) for answer in answers))
        except WrongAnswer:
            return Counting.UNKNOWN
        except (BackendError, _RefusedError):
            return None

    # The pieces.

    def _parts(self, request: InferenceRequest, pairs: Pairs, sizes: ModelSizes) -> list[Part]:
        """The pieces of a request; one or none, if it is to be sent as it came."""
        config, ask, bytes_of = self._config, request.ask, pairs.sizes_bytes
        tokens = sizes.tokens_of_texts(bytes_of)
        ranges = pieces(tokens, min(config.max_batch_items, sizes.cap), config.max_batch_tokens)
        if len(ranges) > 1:
            most = sizes.piece_items(config.max_batch_items)
            ranges = pieces(tokens, most, config.max_batch_tokens, sizes.replicas)
        if not 1 < len(ranges) <= _MOST_PIECES:
            return []
        repeated = repeated_bytes(pairs)
        fills_a_piece = sizes.tokens_of_texts([repeated])[0] >= config.max_batch_tokens
        if fills_a_piece or len(ranges) * repeated > _MOST_BYTES * ask.size_bytes:
            return []
        return [
            Part(
                None, each.start, len(each), sum(tokens[each.start : each.stop]),
                sum(bytes_of[each.start : each.stop]), ask.tenant, ask.weight, alone=True,
            )
            for each in ranges
        ]  # fmt: skip

    async def _collect(self, job: _Job, model: _Model, parts: list[Part]) -> None:
        """Have all pieces answered. Raises _RefusedError if a backend refuses what one of them asks."""
        name, started = job.request.ask.model, self._clock()
        if model.room.busy:
            self._waiting.refuse_if_full(job.request)
        self._metrics.splits.add((name,))
        self._waiting.join(job, job.request)
        try:
            async with self._waiting.in_time(job.request, started) as job.waits:
                with model.room.turns(parts) as turns:
                    async with Tasks() as tasks:
                        tasks.start(self._pieces(job, model, turns, tasks))
        finally:
            self._waiting.leave(job)

    async def _pieces(self, job: _Job, model: _Model, turns: PieceTurns, tasks: Tasks) -> None:
        """Begin each piece when it is its turn, and one a turn of the loop: each writes a body."""
        if job.repeats_query:
            tasks.start(self._query(job))
        number = 0
        async for part in turns:
            job.sent()
            if not job.unsent:
                self._waiting.leave(job)
            tasks.start(self._piece(job, model, turns, number, part))
            number += 1
            await asyncio.sleep(0)

    async def _piece(self, job: _Job, model: _Model, turns: PieceTurns, number: int, part: Part) -> None:
        documents, started = range(part.start, part.start + part.items), self._clock()
        body, name = body_of(job.pairs, documents), str(part.start)
        waited = started - part.joined_seconds
        answer = await self._send(job.request, job.holding, body, name, part.items, job, waited)
        turns.ended(part)
        seconds = self._clock() - started
        scores = job.scores[number] = read_scores(answer, job.pairs, documents)
        model.sizes.answered(part.items, part.size_bytes, scores.prompt_tokens, seconds, are_ids=False)

    async def _query(self, job: _Job) -> None:
        """The tokens of the query: scored against itself, it has twice as many."""
        body = query_body(job.pairs)
        answer = await self._send(job.request, job.holding, body, "query", 1, job)
        job.query_tokens = min(tokens_in(answer), most_prompt_tokens(1, len(body))) // 2

    async def _send(
        self,
        request: InferenceRequest,
        holding: Holding,
        body: bytes,
        name: str,
        sequences: int,
        job: _Job | None = None,
        waited_seconds: float = 0.0,
    ) -> bytes:
        """What a backend answers to a part of the request. `name` tells it from the others."""
        sink = Collected(most_bytes(sequences, len(body)), holding)
        name = f"{request.request_id[:112]}-{name}"  # engines want a name for each
        record = Record(name, request.endpoint, self._clock())
        part = replace(
            request,
            ask=replace(request.ask, sequences=sequences, size_bytes=len(body)),
            request_id=name,
            body=body,
            headers=b"x-request-id: %b\r\n%b" % (name.encode(), request.headers.partition(b"\r\n")[2]),
            pairs=None,
        )
        try:
            async with sink.filling():
                await self._dispatcher.dispatch(part, sink, record)
        finally:
            if job is not None:
                job.told(record, waited_seconds)
        if sink.status != 200:
            raise _RefusedError
        return sink.body

    async def _deliver(self, job: _Job, reply: Reply) -> UpstreamResult:
        record = job.record
        if self._response_headers:
            reply.extra = (
                f"x-gateway-backend: {','.join(job.backends)}\r\n"
                f"x-gateway-queue-ms: {record.queue_seconds * 1000:.0f}\r\n"
                "x-gateway-prefix-tokens: 0\r\nx-gateway-usage: exact\r\n"
            ).encode()
        tokens = sum(part.prompt_tokens for part in job.scores) - (len(job.scores) - 1) * job.query_tokens
        record.prompt_tokens = tokens = max(0, tokens)
        written = answer_pieces(job.request.request_id, job.pairs, job.scores, tokens)
        await deliver(reply, written, sum(part.size_bytes for part in job.scores))
        return UpstreamResult(200, Usage(tokens, 0), record.first_byte_seconds)
