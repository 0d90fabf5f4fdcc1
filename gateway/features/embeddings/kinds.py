"""Embeddings requests, many small ones in few full batches, and long lists of documents, in pieces.

Clients whose embeddings requests spoiled a batch are quarantined: for a while they share batches only with each other.
Without a tenant, a client is an address, which may stand for many clients behind a proxy. While a backend works on a
shared batch, the model's tokenizer counts each client's tokens.

Long rerank and score requests go to all replicas. A piece is sent like any request, with its own lease and retries, and
shares nothing with other clients' pieces.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv6Address
from itertools import islice
from typing import Any, Final, cast

import orjson

from gateway.core.errors import BackendError, WrongAnswer
from gateway.core.observe.record import Record
from gateway.core.request import SEVERAL_TENANTS, InferenceRequest, UpstreamResult, most_prompt_tokens
from gateway.core.resources import Holding
from gateway.feature import TokenCounter
from gateway.features.embeddings import wire
from gateway.features.embeddings.batcher import Batcher
from gateway.features.embeddings.batching import BatchKey, BatchReason, SentBatch
from gateway.features.embeddings.inputs import EmbeddingInputs, Pairs
from gateway.features.embeddings.waiter import BufferedResponse, ClientTarget, EmbeddingWaiter, SendUnchanged, Waiter

_QUARANTINE_SECONDS = 10.0
_MOST_CLIENTS = 1024


class Quarantine:
    """Quarantined clients, whose requests spoiled a batch lately, and the end of each quarantine."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # soonest first

    def add(self, client: str, now: float) -> None:
        self._until.pop(client, None)
        if len(self._until) >= _MOST_CLIENTS:
            del self._until[next(iter(self._until))]
        self._until[client] = now + _QUARANTINE_SECONDS

    def has(self, client: str, now: float) -> bool:
        return self._until.get(client, now) > now


def network_of(address: str) -> str:
    """The address of a client without a name, or the /64 that IPv6 gives to each."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])


def waiters_of(batch: SentBatch) -> list[EmbeddingWaiter]:
    return [cast(EmbeddingWaiter, piece.owner) for piece in batch.pieces]


def items_of(waiters: list[EmbeddingWaiter]) -> list[Any]:
    return [item for waiter in waiters for item in waiter.inputs.items]


CountingTask = asyncio.Task[list[int] | str]  # of the tokens of each text of a batch
_UNKNOWN_FIELDS: Final = "fields"  # of the request, with an unknown effect on tokens
_UNVERIFIED: Final = "unverified"  # the backend that answered was not verified to count alike
_FEW_ITEMS = 8  # a request of more, or of more tokens than the next, is bulk
_FEW_TOKENS = 1024
_HANDED_OUT_BYTES = 262144  # of an answer in one turn of the loop: each client then writes its own


class Coalescer:
    """Answers embeddings requests, most of them by batches of several clients."""

    work = "embeddings"

    def __init__(self, batcher: Batcher, new_id: Callable[[], str], counter: TokenCounter) -> None:
        self._batcher = batcher
        self._clock = batcher.clock
        self._new_id = new_id
        self._counter = counter
        self._quarantine = Quarantine()

    async def dispatch(self, request: InferenceRequest, reply: ClientTarget, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with EmbeddingInputs."""
        batcher, inputs, demand, now = self._batcher, request.work, request.demand, self._clock()
        model = demand.model
        assert isinstance(inputs, EmbeddingInputs)
        if request.explains or not batcher.fleet.serving(model):
            return await batcher.dispatch(request, reply, record)
        sizes = batcher.sizes_of(self, model)
        tokens = sizes.tokens_of(inputs)
        if sizes.may_be_too_long(tokens):
            answer = await batcher.dispatch(request, reply, record)
            if answer.status == 200 and answer.usage is not None:  # it was not: sizes may have been learned wrongly
                sizes.answered_alone(inputs, answer.usage.prompt_tokens, None)
            return answer
        bulk = demand.batch or len(tokens) > _FEW_ITEMS or sum(tokens) > _FEW_TOKENS
        client = demand.tenant or f"address {network_of(reply.address)}"
        quarantined, offline = self._quarantine.has(client, now), demand.offline is not None
        key = BatchKey(model, inputs.template, inputs.are_ids, demand.batch, bulk, quarantined, offline)
        pending = batcher.pending_for(request, key, self)
        max_items, max_tokens = sizes.bounds(batcher.config, offline=offline)
        waiter = EmbeddingWaiter(request, inputs, client, record, now)
        waiter.split(sizes.cut(tokens, max_items, max_tokens), tokens, inputs.sizes_bytes)
        try:
            outcome = await batcher.join(pending, waiter)
            if outcome is SendUnchanged.ALONE:
                return await self._send_unchanged(waiter, reply, isolated=False)
        finally:
            batcher.leave(pending, waiter)
        if isinstance(outcome, SendUnchanged):
            return await self._send_unchanged(waiter, reply, isolated=True)
        return await self._deliver(waiter, outcome, reply)

    def observe(self, batch: SentBatch, reason: BatchReason) -> None:
        model, metrics = (batch.key.model,), self._batcher.metrics
        metrics.flushes.add((*model, reason.value))
        metrics.batch_items.observe(model, batch.items)
        metrics.batch_tokens.observe(model, batch.tokens)
        for piece in batch.pieces:
            metrics.batch_wait.observe(model, batch.sent_seconds - piece.joined_seconds)

    def _request_of(self, batch: SentBatch) -> InferenceRequest:
        """The request for a batch. One of several clients queues as its tenant, or as all of them together."""
        waiters, [first, *others] = waiters_of(batch), batch.pieces
        if not others:
            body = wire.body_of(batch.key.template, waiters[0].inputs.items[first.start : first.start + first.items])
            suffix = "" if waiters[0].whole else str(first.start)
            return wire.part_of(waiters[0].request, body, batch.items, tokens=batch.tokens, suffix=suffix)
        body = wire.body_of(batch.key.template, items_of(waiters))
        name, weights = self._new_id(), {piece.tenant: piece.weight for piece in batch.pieces}
        deadlines = [waiter.request.demand.deadline_seconds for waiter in waiters]
        shared = wire.part_of(waiters[0].request, body, batch.items, batch.tokens)
        demand = replace(
            shared.demand,
            tenant=first.tenant if len(weights) == 1 else SEVERAL_TENANTS,
            weight=sum(weights.values(), 0.0),
            deadline_seconds=None if None in deadlines else max(at for at in deadlines if at is not None),
            offline=wire.short_line([each.request.demand for each in waiters]) if batch.key.offline else None,
        )
        return replace(shared, request_id=name, headers=b"x-request-id: %b\r\n" % name.encode(), demand=demand)

    async def answer(self, batch: SentBatch) -> BufferedResponse | None:
        request, key, counting = self._request_of(batch), batch.key, None
        if len(batch.pieces) > 1 and not key.are_ids and self._counter.configured(key.model):
            counting = asyncio.get_running_loop().create_task(self._count(batch))
        try:
            with Holding(self._batcher.memory) as holding:
                response = await self._batcher.fetch(batch, request, wire.most_vector_bytes(batch.items), holding)
                if response.status != 200:
                    return response
                await self._hand_out(batch, response.body, counting)
        finally:
            if counting is not None:
                counting.cancel()
        return None

    async def _hand_out(self, batch: SentBatch, body: bytes, counting: CountingTask | None) -> None:
        pieces, sizes, record, are_ids = batch.pieces, batch.pending.sizes, batch.record, batch.key.are_ids
        items, size_bytes = batch.items, batch.size_bytes
        assert record is not None
        seconds = self._clock() - batch.sent_seconds - record.queue_seconds
        vectors = wire.read_vectors(body, items)
        sizes.learn_answer_size(items, len(body))
        tokens = min(vectors.prompt_tokens, most_prompt_tokens(items, size_bytes))
        sizes.answered(items, size_bytes, tokens, seconds, are_ids=are_ids)
        weights = [piece.tokens for piece in pieces]
        counts = None if counting is None else self._checked(batch, await counting, tokens, record.backend)
        if counts is not None:
            remaining = iter(counts)
            weights = [sum(islice(remaining, piece.items)) for piece in pieces]
        exact = len(pieces) == 1 or ((are_ids or counts is not None) and sum(weights) == tokens)
        offset = handed_out = 0
        for piece, share in zip(pieces, wire.shares(tokens, weights), strict=True):
            part = slice(offset, offset + piece.items)
            piece.owner.answered(piece, wire.Vectors(vectors.form, vectors.data[part], share, exact))
            offset += piece.items
            handed_out += piece.items * len(body) // items
            if handed_out > _HANDED_OUT_BYTES:
                handed_out = 0
                await asyncio.sleep(0)

    async def _count(self, batch: SentBatch) -> list[int] | str:
        """The tokens of each text of a shared batch; of a request alone, the backend reports them."""
        fields: dict[str, Any] = orjson.loads(batch.key.template + b"0}")
        most = fields.get("truncate_prompt_tokens")
        if most == -1:
            most = batch.pending.sizes.context_tokens or 0
        if most is not None and most <= 0:
            return _UNKNOWN_FIELDS
        texts, special = items_of(waiters_of(batch)), fields.get("add_special_tokens", True)
        counts = await self._counter.count(batch.key.model, texts, batch.size_bytes, special=special)
        if isinstance(counts, str) or most is None:
            return counts
        return [min(count, most) for count in counts]

    def _checked(self, batch: SentBatch, counts: list[int] | str, total: int, backend: str) -> list[int] | None:
        """The tokens of each text, if their sum is the one reported by the backend."""
        model, counted = batch.key.model, self._batcher.metrics.counted
        if not isinstance(counts, str) and not self._counter.counts_alike(model, backend):
            counts = _UNVERIFIED  # the backend joined or restarted while the batch waited
        if isinstance(counts, str):
            counted.add((model, counts))
            return None
        is_sum = sum(counts) == total
        counted.add((model, "counted" if is_sum else "differs"))
        return counts if is_sum else None

    async def _send_unchanged(self, waiter: EmbeddingWaiter, reply: ClientTarget, *, isolated: bool) -> UpstreamResult:
        """Send the request unchanged. `isolated`: its batch was refused."""
        started, request, inputs, record = self._clock(), waiter.request, waiter.request.work, waiter.record
        assert isinstance(inputs, EmbeddingInputs)
        if self._batcher.response_headers:
            reply.add_headers(b"x-gateway-usage: exact\r\n")
        waited = started - waiter.joined_seconds
        record.restarted(waited)
        answer = await self._batcher.dispatch(request, reply, record)
        if answer.status == 200 and answer.usage is not None:
            seconds = self._clock() - started - (record.queue_seconds - waited)
            sizes = self._batcher.sizes_of(self, request.demand.model)
            sizes.answered_alone(inputs, answer.usage.prompt_tokens, seconds)
        elif isolated and answer.status >= 400:
            self._quarantine.add(waiter.client, self._clock())
        return answer

    async def _deliver(
        self, waiter: EmbeddingWaiter, outcome: BufferedResponse | list[wire.Vectors], reply: ClientTarget
    ) -> UpstreamResult:
        batcher, record = self._batcher, waiter.record
        if isinstance(outcome, BufferedResponse):
            batcher.set_headers(reply, waiter, "")
            reply.send(outcome.status, outcome.content_type, outcome.headers, outcome.body)
            return UpstreamResult(outcome.status, None, record.first_byte_seconds)
        vectors, floats = waiter.vectors(outcome), waiter.inputs.wants_floats
        if (choice := waiter.request.model_choice) is not None:
            vectors = replace(vectors, form=vectors.form.under(choice.alias))
        usage = "exact" if vectors.exact else "estimated"
        batcher.set_headers(reply, waiter, f"x-gateway-usage: {usage}\r\n")
        written = wire.vector_pieces(waiter.request.request_id, vectors, floats=floats)
        size_bytes, held_bytes = wire.size_of(vectors.data, floats=floats), wire.size_of(vectors.data, floats=False)
        return await batcher.deliver(
            reply, record, vectors.prompt_tokens, written, size_bytes=size_bytes, held_bytes=held_bytes
        )


_MOST_PIECES = 256  # of one request
_MOST_BYTES = 4  # times the request's tokens may go to the backends: each piece repeats the query


class RerankWaiter(Waiter):
    """A rerank or score request. `holding`: memory for the scores that it has."""

    def __init__(
        self, request: InferenceRequest, pairs: Pairs, record: Record, *, now: float, holding: Holding
    ) -> None:
        super().__init__(request, record, now)
        self.pairs = pairs
        self.holding = holding


class RerankSplitter:
    """Answers rerank and score requests: long lists in pieces, others unchanged."""

    work = "lists of documents"

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._countings: dict[str, asyncio.Future[wire.Counting | None]] = {}  # of models that were or are probed

    def forget(self) -> None:
        """Probe all models again: backends may serve other ones under the same names."""
        self._countings.clear()

    async def dispatch(self, request: InferenceRequest, reply: ClientTarget, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with `pairs`."""
        batcher, model = self._batcher, request.demand.model
        if batcher.fleet.serving(model) and not request.explains:
            with Holding(batcher.memory) as holding:
                waiter = await self._split(request, record, holding)
                if waiter is not None:
                    offline = request.demand.offline is not None
                    key = BatchKey(model, template=b"", bulk=True, offline=offline)
                    pending = batcher.pending_for(request, key, self)
                    try:
                        outcome = await batcher.join(pending, waiter)
                    finally:
                        batcher.leave(pending, waiter)
                    if isinstance(outcome, list):
                        return await self._deliver(waiter, outcome, reply)
                    record.restarted(record.queue_seconds)
        return await batcher.dispatch(request, reply, record)

    async def _split(self, request: InferenceRequest, record: Record, holding: Holding) -> RerankWaiter | None:
        """The request in pieces; None = send it unchanged."""
        pairs, config, sizes = request.work, self._batcher.config, self._batcher.sizes_of(self, request.demand.model)
        assert isinstance(pairs, Pairs)
        tokens, sizes_bytes = sizes.tokens_of_texts(pairs.sizes_bytes), pairs.sizes_bytes
        max_items, max_tokens = config.max_batch_items, config.max_batch_tokens
        if request.demand.offline is not None:
            max_items, max_tokens = sizes.bounds(config, offline=True)
        ranges = sizes.cut(tokens, max_items, max_tokens)
        if not 1 < len(ranges) <= _MOST_PIECES:
            return None
        repeated = len(wire.pairs_body(pairs, range(0)))  # in each piece: all but documents and queries of their own
        fills_a_piece = sizes.tokens_of_texts([repeated])[0] >= config.max_batch_tokens
        if fills_a_piece or len(ranges) * repeated > _MOST_BYTES * request.demand.size_bytes:
            return None
        counting = await self._counting(request, pairs)
        if counting is None or counting is wire.Counting.UNKNOWN:
            return None
        if counting is wire.Counting.QUERY_ONCE and pairs.share_query:  # a piece behind the last one measures it
            ranges.insert(0, range(len(tokens), len(tokens) + 1))
            sizes_bytes = [*sizes_bytes, len(wire.query_body(pairs))]
            tokens = sizes.tokens_of_texts(sizes_bytes)
        waiter = RerankWaiter(request, pairs, record, now=self._batcher.clock(), holding=holding)
        waiter.split(ranges, tokens, sizes_bytes)
        return waiter

    async def _counting(self, request: InferenceRequest, pairs: Pairs) -> wire.Counting | None:
        """How the model counts tokens, if probes show it. Requests that come meanwhile wait for the same probes."""
        model = request.demand.model
        if (known := self._countings.get(model)) is not None:
            return await asyncio.shield(known)
        probed = self._countings[model] = asyncio.get_running_loop().create_future()
        found: wire.Counting | None = None
        try:
            found = await self._probe(request, pairs)
        finally:
            probed.set_result(found)
            if found is None and self._countings.get(model) is probed:
                del self._countings[model]
        return found

    async def _probe(self, request: InferenceRequest, pairs: Pairs) -> wire.Counting | None:
        """None if backends fail or refuse the probes. Others wait for them, so they do not wait for idle capacity."""
        request = replace(request, demand=replace(request.demand, offline=None))
        counted: list[int] = []
        try:
            for count, body in enumerate(wire.probes(request.demand.model, pairs), 1):
                probe = wire.part_of(request, body, count, tokens=2 * count, suffix=f"probe-{count}")
                record = Record(probe.request_id, probe.endpoint, self._batcher.clock())
                with Holding(self._batcher.memory) as holding:
                    most = wire.most_score_bytes(count, len(body))
                    response = await BufferedResponse(most, holding).fetch(self._batcher.dispatch, probe, record)
                if response.status != 200:
                    return None
                counted.append(wire.tokens_in(response.body))
        except WrongAnswer:
            return wire.Counting.UNKNOWN
        except BackendError:
            return None
        return wire.Counting.of(*counted)

    def observe(self, batch: SentBatch, reason: BatchReason) -> None:
        """Pieces are not counted among the batches of embeddings."""

    async def answer(self, batch: SentBatch) -> BufferedResponse | None:
        [piece] = batch.pieces
        waiter, documents = cast(RerankWaiter, piece.owner), range(piece.start, piece.start + piece.items)
        measures_query = piece.start == len(waiter.pairs.documents)
        body = wire.query_body(waiter.pairs) if measures_query else wire.pairs_body(waiter.pairs, documents)
        suffix = "query" if measures_query else str(piece.start)
        request = wire.part_of(waiter.request, body, piece.items, tokens=piece.tokens, suffix=suffix)
        with Holding(self._batcher.memory) as holding:
            response = await self._batcher.fetch(batch, request, wire.most_score_bytes(piece.items, len(body)), holding)
            if response.status != 200:
                return response
            if measures_query:  # scored against itself, it has twice as many tokens
                tokens = min(wire.tokens_in(response.body), most_prompt_tokens(1, len(body))) // 2
                waiter.answered(piece, wire.Scores(wire.AnswerForm({}, ""), [], tokens, size_bytes=0))
                return None
            scores = wire.read_scores(response.body, waiter.pairs, documents)
        seconds = self._batcher.clock() - batch.sent_seconds
        batch.pending.sizes.answered(piece.items, piece.size_bytes, scores.prompt_tokens, seconds, are_ids=False)
        if not waiter.outcome.done():
            waiter.holding.add(scores.size_bytes)
            waiter.answered(piece, scores)
        return None

    async def _deliver(self, waiter: RerankWaiter, parts: list[wire.Scores], reply: ClientTarget) -> UpstreamResult:
        scored = [scores for scores in parts if scores.entries]
        query_tokens = sum(scores.prompt_tokens for scores in parts if not scores.entries)  # of one, if it was measured
        tokens = max(0, sum(scores.prompt_tokens for scores in scored) - (len(scored) - 1) * query_tokens)
        if (choice := waiter.request.model_choice) is not None:
            scored[0] = replace(scored[0], form=scored[0].form.under(choice.alias))
        written = wire.score_pieces(waiter.request.request_id, waiter.pairs, scored, tokens)
        self._batcher.set_headers(reply, waiter, "x-gateway-usage: exact\r\n")
        size_bytes = sum(scores.size_bytes for scores in scored)  # which the waiter holds
        return await self._batcher.deliver(reply, waiter.record, tokens, written, size_bytes=size_bytes, held_bytes=0)
