"""Long rerank and score requests go to all replicas, piece by piece. The asyncio side.

A piece is sent like any request, with a lease and retries of its own, and shares nothing with other clients' pieces.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gateway.admission.backlog import Backlog
from gateway.backends.registry import Fleet
from gateway.config import EmbeddingsConfig
from gateway.dispatch import Dispatcher
from gateway.embeddings.bulk import BulkShares
from gateway.embeddings.collected import Collected
from gateway.embeddings.deliver import deliver
from gateway.embeddings.part import Part
from gateway.embeddings.sizes import ModelSizes
from gateway.embeddings.split import pieces
from gateway.embeddings.waiting import Waiting
from gateway.errors import BackendError, WrongAnswer
from gateway.front.reply import Reply
from gateway.memory import Holding, MemoryBudget
from gateway.observe.embeddings import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.relay.exchange import UpstreamResult
from gateway.request import InferenceRequest, Pairs, Usage, most_prompt_tokens
from gateway.scoring.counting import Counting, counting_of, probes
from gateway.scoring.pairs import body_of, query_body, repeated_bytes
from gateway.scoring.piece_queue import PieceQueue, PieceTurns
from gateway.scoring.scores import Scores, answer_pieces, most_bytes, read_scores, tokens_in
from gateway.scoring.tasks import Tasks

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
            sizes.learn_engines(name, engines, self._fleet.serving(name) or (), self._clock())

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
