"""Long rerank and score requests go to all replicas, piece by piece.

A piece is sent like any request, with a lease and retries of its own, and shares nothing with other clients' pieces.
Tenants take turns for a model's slots, and a quarter of the slots is kept for short requests. `Tasks` works like
`asyncio.TaskGroup`, which in Python 3.11 leaves the waiting task half cancelled after a failure.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from gateway.embeddings.delivery import BufferedResponse, ClientTarget, deliver
from gateway.embeddings.fair_queue import FairQueue, Piece
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
from gateway.embeddings.services import PoolServices
from gateway.embeddings.sizes import ModelSizes
from gateway.embeddings.wire import name_of_piece
from gateway.errors import BackendError, WrongAnswer
from gateway.observe.record import Record
from gateway.request import InferenceRequest, Pairs, UpstreamResult, Usage, most_prompt_tokens
from gateway.resources import Holding


class PieceTurns:
    """The pieces of one list: iterating gives each when its slots are taken; `ended` gives them back."""

    def __init__(self, queue: "PieceQueue", pieces: int) -> None:
        self._queue = queue
        self._due: asyncio.Queue[Piece[PieceTurns]] = asyncio.Queue()
        self._pieces = pieces
        self._holds: set[Piece[PieceTurns]] = set()

    async def __aiter__(self) -> "AsyncIterator[Piece[PieceTurns]]":
        for _ in range(self._pieces):
            yield await self._due.get()

    def begin(self, piece: "Piece[PieceTurns]") -> None:
        """A piece has its slots and may be sent."""
        self._holds.add(piece)
        self._due.put_nowait(piece)

    def ended(self, piece: "Piece[PieceTurns]") -> None:
        """Return the slots of a piece. Safe to call again."""
        if piece in self._holds:
            self._holds.remove(piece)
            self._queue.give_back(piece.items)

    def end(self) -> None:
        """Return the slots of all its pieces."""
        held, self._holds = self._holds, set()
        if held:
            self._queue.give_back(sum(piece.items for piece in held))


class PieceQueue:
    """Owner of the pieces of one model that wait to be sent, or are in flight.

    `update` brings the sizes up to date. Slots count by the engines' limits of now, not by their caps: a piece that
    waits behind others of its own list must wait here, because `max_wait_seconds` does not count here.
    """

    def __init__(self, sizes: ModelSizes, update: Callable[[], None]) -> None:
        self._sizes = sizes
        self._update = update
        self._queue: FairQueue[PieceTurns] = FairQueue()

    @property
    def busy(self) -> int:
        """Pieces that wait, and documents in flight."""
        return len(self._queue) + self._sizes.bulk.items

    @property
    def next_items(self) -> int:
        """Documents of the piece that comes next; 0 if none waits."""
        return self._queue.next_items

    @contextmanager
    def turns(self, count: int, make: Callable[[PieceTurns], list[Piece[PieceTurns]]]) -> Iterator[PieceTurns]:
        """Queue the pieces of one list. The end of the block removes them and returns their slots."""
        turns = PieceTurns(self, count)
        pieces = make(turns)
        for piece in pieces:
            self._queue.join(piece)
        try:
            self.look()
            yield turns
        finally:
            for piece in pieces:
                self._queue.leave(piece)
            turns.end()
            self.look_soon()

    def give_back(self, items: int) -> None:
        self._sizes.bulk.give_back(items)  # which makes all kinds look

    def look_soon(self) -> None:
        """Look at the end of this turn of the loop, as the coalescer does: else it would always be later."""
        asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Begin the pieces that slots are free for; one may always go."""
        sizes, queue = self._sizes, self._queue
        if queue:
            self._update()
        share = sizes.total_limit - sizes.total_limit // 4
        while queue and sizes.bulk.may_take(queue.next_items, share):
            [piece] = queue.take(1, 1)
            sizes.bulk.take(piece.items)
            piece.owner.begin(piece)


Result = TypeVar("Result")


class Tasks:
    """Tasks, which may start others. The end of the block waits for all; when one fails, the others are aborted."""

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
_WORK = "lists of documents"  # in errors
_NOTHING = Scores({}, [], 0, 0)  # until a piece is answered


class _RefusedError(Exception):
    """A backend refuses a piece: the client should get the refusal of its whole request."""


class _Model:
    """One model: its queue, and how it counts tokens."""

    def __init__(self, sizes: ModelSizes, queue: PieceQueue) -> None:
        self.sizes = sizes
        self.queue = queue
        self._counting: Counting | None = None  # until probes were answered
        self._probes = 0
        self._probing = asyncio.Lock()

    def forget(self) -> None:
        self._counting = None

    async def counting(self, probe: Callable[[], Awaitable[Counting | None]]) -> Counting | None:
        """How the model counts tokens, if a probe shows it. A request that waited for a failed probe sends none."""
        probes = self._probes
        async with self._probing:
            if self._counting is None and self._probes == probes:
                try:
                    self._counting = await probe()
                finally:
                    self._probes += 1
            return self._counting


class _Job:
    """One client's request in pieces. `repeats_query`: each of them counts the same query again."""

    def __init__(
        self,
        request: InferenceRequest,
        pairs: Pairs,
        record: Record,
        pieces: int,
        holding: Holding,
        repeats_query: bool,
    ) -> None:
        self.request = request
        self.pairs = pairs
        self.record = record
        self.holding = holding  # of what was answered
        self.repeats_query = repeats_query
        self._query_tokens = 0
        self.scores: list[Scores] = [_NOTHING] * pieces
        self.backends: dict[str, None] = {}

    @property
    def tokens(self) -> int:
        """The tokens of the whole request, with a repeated query counted once."""
        repeated = (len(self.scores) - 1) * self._query_tokens
        return max(0, sum(scores.prompt_tokens for scores in self.scores) - repeated)

    def query_counted(self, tokens: int) -> None:
        self._query_tokens = tokens

    def piece_ended(self, record: Record, waited_seconds: float) -> None:
        """Note what is known of one of its pieces, however it ended."""
        if record.backend:
            self.backends[record.backend] = None
        self.record.merge(record, waited_seconds)


class RerankSplitter:
    """Answers rerank and score requests. Owner of those that are in pieces."""

    def __init__(self, services: PoolServices) -> None:
        self._services = services
        self._clock = services.clock
        self._waitlist = services.waitlist
        self._models: dict[str, _Model] = {}

    def __repr__(self) -> str:
        return f"<RerankSplitter {len(self._waitlist)} requests waiting, {self.busy} in all>"

    @property
    def busy(self) -> int:
        """Requests, pieces and documents; 0 when the splitter is at rest."""
        return len(self._waitlist) + sum(model.queue.busy for model in self._models.values())

    def forget(self) -> None:
        """Probe all models again: backends may serve other ones under the same names."""
        for model in self._models.values():
            model.forget()

    async def dispatch(self, request: InferenceRequest, reply: ClientTarget, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with `pairs`."""
        pairs = request.pairs
        assert pairs is not None
        if self._services.fleet.candidates(request.demand.model) and not request.explains:
            model = self._model(request.demand.model)
            tokens = model.sizes.tokens_of_texts(pairs.sizes_bytes)
            ranges = self._ranges(request, pairs, model.sizes, tokens)
            counting = await model.counting(partial(self._probe, request, pairs)) if ranges else None
            if counting is Counting.PAIRS or counting is Counting.QUERY_ONCE:
                again = counting is Counting.QUERY_ONCE and pairs.share_query
                with Holding(self._services.memory) as holding:
                    job = _Job(request, pairs, record, len(ranges), holding, again)
                    try:
                        await self._collect(job, model, ranges, tokens)
                    except _RefusedError:
                        record.restarted(record.queue_seconds)
                    else:
                        return await self._deliver(job, reply)
        return await self._services.dispatch(request, reply, record)

    # What is known of a model.

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            sizes = self._services.new_sizes(name, lambda: queue.next_items, lambda: queue.look_soon())
            queue = PieceQueue(sizes, lambda: self._update(name, sizes))
            model = self._models[name] = _Model(sizes, queue)
        self._update(name, model.sizes)
        return model

    def _update(self, name: str, sizes: ModelSizes) -> None:
        self._services.update(name, sizes, self._services.fleet.candidates(name))

    async def _probe(self, request: InferenceRequest, pairs: Pairs) -> Counting | None:
        """None if backends fail or refuse the probes."""
        try:
            with Holding(self._services.memory) as holding:
                async with Tasks() as tasks:
                    answers = [
                        tasks.start(self._send(request, holding, body, f"probe-{count}", count))
                        for count, body in enumerate(probes(request.demand.model, pairs), 1)
                    ]
            return counting_of(*(tokens_in(answer.result()) for answer in answers))
        except WrongAnswer:
            return Counting.UNKNOWN
        except (BackendError, _RefusedError):
            return None

    # The pieces.

    def _ranges(self, request: InferenceRequest, pairs: Pairs, sizes: ModelSizes, tokens: list[int]) -> list[range]:
        """The pieces of a request; none, if it is to be sent as it came."""
        config = self._services.config
        ranges = self._services.cut(tokens, sizes, config.max_batch_items)
        if not 1 < len(ranges) <= _MOST_PIECES:
            return []
        repeated = repeated_bytes(pairs)
        fills_a_piece = sizes.tokens_of_texts([repeated])[0] >= config.max_batch_tokens
        if fills_a_piece or len(ranges) * repeated > _MOST_BYTES * request.demand.size_bytes:
            return []
        return ranges

    async def _collect(self, job: _Job, model: _Model, ranges: list[range], tokens: list[int]) -> None:
        """Have all pieces answered. Raises _RefusedError if a backend refuses one of them."""
        services, request, started = self._services, job.request, self._clock()
        if model.queue.busy:
            self._waitlist.refuse_if_full(request, _WORK)
        services.metrics.splits.add((request.demand.model,))
        make = partial(services.pieces_of, request.demand, ranges, tokens, job.pairs.sizes_bytes)
        async with self._waitlist.place(job, request, started, _WORK) as timeout:
            with model.queue.turns(len(ranges), make) as turns:
                async with Tasks() as tasks:
                    tasks.start(self._pieces(job, model, turns, tasks, timeout))

    async def _pieces(
        self, job: _Job, model: _Model, turns: PieceTurns, tasks: Tasks, timeout: asyncio.Timeout
    ) -> None:
        """Begin each piece when it is its turn, and one a turn of the loop: each writes a body."""
        if job.repeats_query:
            tasks.start(self._query(job))
        number = 0
        async for piece in turns:
            if not timeout.expired():
                timeout.reschedule(None)  # with the first piece, the wait is over
            tasks.start(self._piece(job, model, turns, number, piece))
            number += 1
            if number == len(job.scores):
                self._waitlist.leave(job)
            await asyncio.sleep(0)

    async def _piece(self, job: _Job, model: _Model, turns: PieceTurns, number: int, piece: Piece[PieceTurns]) -> None:
        documents, started = range(piece.start, piece.start + piece.items), self._clock()
        body, name = body_of(job.pairs, documents), str(piece.start)
        waited = started - piece.joined_seconds
        answer = await self._send(job.request, job.holding, body, name, piece.items, job, waited)
        turns.ended(piece)
        seconds = self._clock() - started
        scores = job.scores[number] = read_scores(answer, job.pairs, documents)
        model.sizes.answered(piece.items, piece.size_bytes, scores.prompt_tokens, seconds, are_ids=False)

    async def _query(self, job: _Job) -> None:
        """Count the tokens of the query: scored against itself, it has twice as many."""
        body = query_body(job.pairs)
        answer = await self._send(job.request, job.holding, body, "query", 1, job)
        job.query_counted(min(tokens_in(answer), most_prompt_tokens(1, len(body))) // 2)

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
        """Send a piece of the request. `name` is added to its request id."""
        response = BufferedResponse(most_bytes(sequences, len(body)), holding)
        name, headers = name_of_piece(request, name)
        record = Record(name, request.endpoint, self._clock())
        demand = replace(request.demand, sequences=sequences, size_bytes=len(body))
        piece = replace(request, demand=demand, request_id=name, body=body, headers=headers, pairs=None)
        try:
            async with response.filling():
                await self._services.dispatch(piece, response, record)
        finally:
            if job is not None:
                job.piece_ended(record, waited_seconds)
        if response.status != 200:
            raise _RefusedError
        return response.body

    async def _deliver(self, job: _Job, reply: ClientTarget) -> UpstreamResult:
        record = job.record
        reply.set_backend_headers(
            self._services.headers(job.backends, record.queue_seconds, "x-gateway-usage: exact\r\n")
        )
        tokens = job.tokens
        record.counted(tokens)
        written = answer_pieces(job.request.request_id, job.pairs, job.scores, tokens)
        await deliver(reply, written, sum(scores.size_bytes for scores in job.scores))
        return UpstreamResult(200, Usage(tokens, 0), record.first_byte_seconds)
