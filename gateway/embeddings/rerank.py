"""Long rerank and score requests go to all replicas, piece by piece.

A piece is sent like any request, with a lease and retries of its own, and shares nothing with other clients' pieces.
"""

import asyncio
from typing import cast

from gateway.embeddings import wire
from gateway.embeddings.batcher import Batcher
from gateway.embeddings.batching import BatchKey, BatchReason, SentBatch
from gateway.embeddings.sizes import ModelSizes
from gateway.embeddings.waiter import BufferedResponse, ClientTarget, Waiter, fetch
from gateway.embeddings.wire import Counting, Scores
from gateway.errors import BackendError, WrongAnswer
from gateway.observe.record import Record
from gateway.request import InferenceRequest, Pairs, UpstreamResult, most_prompt_tokens
from gateway.resources import Holding

_MOST_PIECES = 256  # of one request
_MOST_BYTES = 4  # times those of the request may go to the backends: each piece repeats the query


class RerankWaiter(Waiter):
    """A rerank or score request. `holding`: memory for the scores that it has."""

    def __init__(self, request: InferenceRequest, pairs: Pairs, record: Record, now: float, holding: Holding) -> None:
        super().__init__(request, record, now)
        self.pairs = pairs
        self.holding = holding


class RerankSplitter:
    """Answers rerank and score requests: long lists in pieces, others as they came."""

    work = "lists of documents"

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._countings: dict[str, asyncio.Future[Counting | None]] = {}  # of models that were or are probed

    def forget(self) -> None:
        """Probe all models again: backends may serve other ones under the same names."""
        self._countings.clear()

    async def dispatch(self, request: InferenceRequest, reply: ClientTarget, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with `pairs`."""
        batcher, model = self._batcher, request.demand.model
        if batcher.fleet.serving(model) and not request.explains:
            sizes = batcher.sizes_of(self, model)
            with Holding(batcher.memory) as holding:
                waiter = await self._split(request, record, sizes, holding)
                if waiter is not None:
                    pending = batcher.pending_for(request, BatchKey(model, template=b"", bulk=True), self)
                    try:
                        outcome = await batcher.join(pending, waiter)
                    finally:
                        batcher.leave(pending, waiter)
                    if isinstance(outcome, list):
                        return await self._deliver(waiter, outcome, reply)
                    record.restarted(record.queue_seconds)
        return await batcher.dispatch(request, reply, record)

    async def _split(
        self, request: InferenceRequest, record: Record, sizes: ModelSizes, holding: Holding
    ) -> RerankWaiter | None:
        """The request in pieces; None, if it is to be sent as it came."""
        pairs, config = request.pairs, self._batcher.config
        assert pairs is not None
        tokens, sizes_bytes = sizes.tokens_of_texts(pairs.sizes_bytes), pairs.sizes_bytes
        ranges = sizes.cut(tokens, config.max_batch_items, config.max_batch_tokens)
        if not 1 < len(ranges) <= _MOST_PIECES:
            return None
        repeated = len(wire.pairs_body(pairs, range(0)))  # in each piece: all but documents and queries of their own
        fills_a_piece = sizes.tokens_of_texts([repeated])[0] >= config.max_batch_tokens
        if fills_a_piece or len(ranges) * repeated > _MOST_BYTES * request.demand.size_bytes:
            return None
        counting = await self._counting(request, pairs)
        if counting is None or counting is Counting.UNKNOWN:
            return None
        if counting is Counting.QUERY_ONCE and pairs.share_query:  # a piece behind the last document measures the query
            ranges.insert(0, range(len(tokens), len(tokens) + 1))
            sizes_bytes = [*sizes_bytes, len(wire.query_body(pairs))]
            tokens = sizes.tokens_of_texts(sizes_bytes)
        waiter = RerankWaiter(request, pairs, record, self._batcher.clock(), holding)
        waiter.split(ranges, tokens, sizes_bytes)
        return waiter

    # What a model reads.

    async def _counting(self, request: InferenceRequest, pairs: Pairs) -> Counting | None:
        """How the model counts tokens, if probes show it. Requests that come meanwhile wait for the same probes."""
        model = request.demand.model
        if (known := self._countings.get(model)) is not None:
            return await asyncio.shield(known)
        probed = self._countings[model] = asyncio.get_running_loop().create_future()
        found: Counting | None = None
        try:
            found = await self._probe(request, pairs)
        finally:
            probed.set_result(found)
            if found is None and self._countings.get(model) is probed:
                del self._countings[model]
        return found

    async def _probe(self, request: InferenceRequest, pairs: Pairs) -> Counting | None:
        """None if backends fail or refuse the probes."""
        counted: list[int] = []
        try:
            for count, body in enumerate(wire.probes(request.demand.model, pairs), 1):
                probe = wire.part_of(request, body, count, f"probe-{count}")
                record = Record(probe.request_id, probe.endpoint, self._batcher.clock())
                with Holding(self._batcher.memory) as holding:
                    most = wire.most_score_bytes(count, len(body))
                    response = await fetch(self._batcher.dispatch, probe, record, most, holding)
                if response.status != 200:
                    return None
                counted.append(wire.tokens_in(response.body))
        except WrongAnswer:
            return Counting.UNKNOWN
        except BackendError:
            return None
        return Counting.of(*counted)

    # The pieces.

    def observe(self, batch: SentBatch, reason: BatchReason) -> None:
        """Pieces are not counted among the batches of embeddings."""

    async def answer(self, batch: SentBatch) -> BufferedResponse | None:
        [piece] = batch.pieces
        waiter, documents = cast(RerankWaiter, piece.owner), range(piece.start, piece.start + piece.items)
        measures_query = piece.start == len(waiter.pairs.documents)
        body = wire.query_body(waiter.pairs) if measures_query else wire.pairs_body(waiter.pairs, documents)
        request = wire.part_of(waiter.request, body, piece.items, "query" if measures_query else str(piece.start))
        with Holding(self._batcher.memory) as holding:
            response = await self._batcher.fetch(batch, request, wire.most_score_bytes(piece.items, len(body)), holding)
            if response.status != 200:
                return response
            if measures_query:  # scored against itself, it has twice as many tokens
                tokens = min(wire.tokens_in(response.body), most_prompt_tokens(1, len(body))) // 2
                waiter.answered(piece, Scores({}, [], tokens, 0))
                return None
            scores = wire.read_scores(response.body, waiter.pairs, documents)
        seconds = self._batcher.clock() - batch.sent_seconds
        batch.pending.sizes.answered(piece.items, piece.size_bytes, scores.prompt_tokens, seconds, are_ids=False)
        if not waiter.outcome.done():
            waiter.holding.add(scores.size_bytes)
            waiter.answered(piece, scores)
        return None

    async def _deliver(self, waiter: RerankWaiter, parts: list[Scores], reply: ClientTarget) -> UpstreamResult:
        scored = [scores for scores in parts if scores.entries]
        query_tokens = sum(scores.prompt_tokens for scores in parts if not scores.entries)  # of one, if it was measured
        tokens = max(0, sum(scores.prompt_tokens for scores in scored) - (len(scored) - 1) * query_tokens)
        written = wire.score_pieces(waiter.request.request_id, waiter.pairs, scored, tokens)
        self._batcher.set_headers(reply, waiter, "x-gateway-usage: exact\r\n")
        size_bytes = sum(scores.size_bytes for scores in scored)  # which the waiter holds
        return await self._batcher.deliver(reply, waiter.record, tokens, written, size_bytes, held_bytes=0)
