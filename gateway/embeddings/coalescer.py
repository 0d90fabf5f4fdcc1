"""Many small embeddings requests become few full batches, and long lists are spread over replicas.

Clients whose requests spoiled a batch are quarantined: for a while they share batches only with each other. Without a
tenant, a client is an address, which may stand for many clients behind a proxy. While a backend works on a shared
batch, the model's tokenizer counts each client's tokens.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import IPv6Address
from itertools import islice
from typing import Any, cast

import orjson

from gateway.embeddings.batcher import Batcher
from gateway.embeddings.batching import BatchKey, BatchReason, SentBatch
from gateway.embeddings.cache import CachedWaiter, EmbeddingCache
from gateway.embeddings.delivery import BufferedResponse, ClientTarget
from gateway.embeddings.sizes import ModelSizes
from gateway.embeddings.waiter import EmbeddingWaiter, SendUnchanged
from gateway.embeddings.wire import Vectors, answer_pieces, body_of, most_bytes, part_of, read_vectors, shares, size_of
from gateway.observe.metrics import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.request import SEVERAL_TENANTS, InferenceRequest, UpstreamResult, most_prompt_tokens
from gateway.resources import Holding
from gateway.tokenization.tokenization import NotCounted, Tokenization

_QUARANTINE_SECONDS = 10.0
_MOST_CLIENTS = 1024


class Quarantine:
    """The clients whose requests spoiled a batch lately, and when that ends for each."""

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


Count = asyncio.Task[list[int] | NotCounted]  # of the tokens of each text of a batch


def waiters_of(batch: SentBatch) -> list[EmbeddingWaiter]:
    return [cast(EmbeddingWaiter, piece.owner) for piece in batch.pieces]


class TokenCounts:
    """Counts the tokens of shared batches; for a request alone, the backend reports its usage."""

    def __init__(self, tokenization: Tokenization, metrics: EmbeddingMetrics) -> None:
        self._tokenization = tokenization
        self._metrics = metrics

    @contextmanager
    def counting(self, batch: SentBatch) -> Iterator[Count | None]:
        """Count a batch while the block runs, if that is needed and configured."""
        key = batch.key
        if len(batch.pieces) < 2 or key.are_ids or not self._tokenization.configured(key.model):
            yield None
            return
        task = asyncio.get_running_loop().create_task(self._of_texts(batch))
        try:
            yield task
        finally:
            task.cancel()

    async def _of_texts(self, batch: SentBatch) -> list[int] | NotCounted:
        fields: dict[str, Any] = orjson.loads(batch.key.template + b"0}")
        most = fields.get("truncate_prompt_tokens")
        if most == -1:
            most = batch.pending.sizes.context_tokens or 0
        if most is not None and most <= 0:
            return NotCounted.FIELDS
        texts: list[Any] = [item for waiter in waiters_of(batch) for item in waiter.inputs.items]
        special = fields.get("add_special_tokens", True)
        counts = await self._tokenization.count(batch.key.model, texts, batch.size_bytes, special=special)
        if isinstance(counts, NotCounted) or most is None:
            return counts
        return [min(count, most) for count in counts]

    async def checked(self, batch: SentBatch, count: Count, total: int, backend: str) -> list[int] | None:
        """The tokens of each text, if they are those of the backend that answered, which reports this sum."""
        model, counts = batch.key.model, await count
        if not isinstance(counts, NotCounted) and not self._tokenization.counts_alike(model, backend):
            counts = NotCounted.UNVERIFIED  # the backend came or restarted while the batch waited
        if isinstance(counts, NotCounted):
            self._metrics.counted.add((model, counts.value))
            return None
        is_sum = sum(counts) == total
        self._metrics.counted.add((model, "counted" if is_sum else "differs"))
        return counts if is_sum else None


_FEW_ITEMS = 8  # a request of more, or of more tokens than the next, is bulk
_FEW_TOKENS = 1024
_HANDED_OUT_BYTES = 262144  # of an answer in one turn of the loop: each client then writes its own


class Coalescer:
    """Answers embeddings requests, most of them by batches of several clients."""

    work = "embeddings"

    def __init__(
        self, batcher: Batcher, new_id: Callable[[], str], token_counts: TokenCounts, cache: EmbeddingCache | None
    ) -> None:
        self._batcher = batcher
        self._clock = batcher.clock
        self._new_id = new_id
        self._token_counts = token_counts
        self._cache = cache
        self._quarantine = Quarantine()

    async def dispatch(self, request: InferenceRequest, reply: ClientTarget, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with `inputs`."""
        batcher, inputs, demand, now = self._batcher, request.inputs, request.demand, self._clock()
        model, engines = demand.model, batcher.fleet.candidates(demand.model)
        assert inputs is not None
        client = demand.tenant or f"address {network_of(reply.address)}"
        cached: CachedWaiter | None = None
        if self._cache is not None and self._cache.is_on(model) and engines is not None and not request.explains:
            cached = CachedWaiter(self._cache, request, client, record, now)
            if cached.document is not None:  # nothing is missing: no backend is needed
                cached.begin([])
                return await self._deliver(cached, [Vectors(cached.document, [], 0)], reply)
        if request.explains or not engines:
            return await batcher.dispatch(request, reply, record)
        sizes = batcher.sizes_of(self, model)
        tokens = sizes.tokens_of(inputs)
        if sizes.may_be_too_long(tokens):
            answer = await batcher.dispatch(request, reply, record)
            if answer.status == 200 and answer.usage is not None:  # it was not: sizes may have been learned wrongly
                sizes.answered_alone(inputs, answer.usage.prompt_tokens, None)
            return answer
        if cached is not None:  # what is cached is not sent
            tokens = [tokens[place] for place in cached.missing]
        bulk = demand.batch or len(tokens) > _FEW_ITEMS or sum(tokens) > _FEW_TOKENS
        quarantined = self._quarantine.has(client, now)
        key = BatchKey(model, inputs.template, inputs.are_ids, inputs.isolation, demand.batch, bulk, quarantined)
        pending = batcher.pending_for(request, key, self)
        if cached is not None:
            cached.begin(tokens)
        waiter = cached or EmbeddingWaiter(request, inputs, client, record, now)
        ranges = batcher.cut(tokens, sizes, sizes.most_items(batcher.config.max_batch_items))
        waiter.split(ranges, tokens, waiter.inputs.sizes_bytes)
        async with batcher.joined(pending, waiter) as outcome:
            if isinstance(outcome, SendUnchanged) and not outcome.isolated:  # it keeps the place of its batch
                return await self._send_unchanged(waiter, sizes, reply, isolated=False)
        is_about_a_part = cached is not None and cached.sends_a_part and isinstance(outcome, BufferedResponse)
        if isinstance(outcome, SendUnchanged) or is_about_a_part:
            return await self._send_unchanged(waiter, sizes, reply, isolated=True)
        return await self._deliver(waiter, outcome, reply)

    # Batches.

    def observe(self, batch: SentBatch, reason: BatchReason) -> None:
        model, metrics = (batch.key.model,), self._batcher.metrics
        metrics.flushes.add((*model, reason.value))
        metrics.batch_items.observe(model, batch.items)
        metrics.batch_tokens.observe(model, sum(piece.tokens for piece in batch.pieces))
        for piece in batch.pieces:
            metrics.batch_wait.observe(model, batch.sent_seconds - piece.joined_seconds)

    def _request_of(self, batch: SentBatch) -> InferenceRequest:
        """The request for a batch. One of several clients queues as its tenant, or as all of them together."""
        waiters, pieces = waiters_of(batch), batch.pieces
        first = waiters[0].request
        if len(pieces) == 1:
            start, items = pieces[0].start, waiters[0].inputs.items
            body = body_of(batch.key.template, items[start : start + pieces[0].items])
            return part_of(first, body, batch.items, "" if waiters[0].whole else str(start))
        body = body_of(batch.key.template, [item for waiter in waiters for item in waiter.inputs.items])
        name, weights = self._new_id(), {piece.tenant: piece.weight for piece in pieces}
        deadlines = [waiter.request.demand.deadline_seconds for waiter in waiters]
        shared = part_of(first, body, batch.items)
        demand = replace(
            shared.demand,
            tenant=pieces[0].tenant if len(weights) == 1 else SEVERAL_TENANTS,
            weight=sum(weights.values(), 0.0),
            deadline_seconds=None if None in deadlines else max(at for at in deadlines if at is not None),
        )
        return replace(shared, request_id=name, headers=b"x-request-id: %b\r\n" % name.encode(), demand=demand)

    async def answer(self, batch: SentBatch) -> BufferedResponse | None:
        request = self._request_of(batch)
        with Holding(self._batcher.memory) as holding, self._token_counts.counting(batch) as count:
            response = await self._batcher.fetch(batch, request, most_bytes(batch.items), holding)
            if response.status != 200:
                return response
            await self._hand_out(batch, response.body, count)
        return None

    async def _hand_out(self, batch: SentBatch, body: bytes, count: Count | None) -> None:
        pieces, sizes, record, are_ids = batch.pieces, batch.pending.sizes, batch.record, batch.key.are_ids
        items, size_bytes = batch.items, batch.size_bytes
        assert record is not None
        seconds = self._clock() - batch.sent_seconds - record.queue_seconds
        vectors = read_vectors(body, items)
        sizes.learn_answer_size(items, len(body))
        tokens = min(vectors.prompt_tokens, most_prompt_tokens(items, size_bytes))
        sizes.answered(items, size_bytes, tokens, seconds, are_ids=are_ids)
        weights = [piece.tokens for piece in pieces]
        counts = None
        if count is not None:
            counts = await self._token_counts.checked(batch, count, tokens, record.backend)
        if counts is not None:
            remaining = iter(counts)
            weights = [sum(islice(remaining, piece.items)) for piece in pieces]
        exact = len(pieces) == 1 or ((are_ids or counts is not None) and sum(weights) == tokens)
        offset = handed_out = 0
        for piece, share in zip(pieces, shares(tokens, weights), strict=True):
            part = slice(offset, offset + piece.items)
            own_counts = None if counts is None else counts[part]
            piece.owner.answered(piece, Vectors(vectors.document, vectors.data[part], share, own_counts, exact))
            offset += piece.items
            handed_out += piece.items * len(body) // items
            if handed_out > _HANDED_OUT_BYTES:
                handed_out = 0
                await asyncio.sleep(0)

    # Answering.

    async def _send_unchanged(
        self, waiter: EmbeddingWaiter, sizes: ModelSizes, reply: ClientTarget, *, isolated: bool
    ) -> UpstreamResult:
        """Send the request as it came. `isolated`: a batch that it was part of was refused."""
        started, request, inputs, record = self._clock(), waiter.request, waiter.request.inputs, waiter.record
        assert inputs is not None
        if self._batcher.response_headers:
            reply.add_headers(b"x-gateway-usage: exact\r\n")
        waited = started - waiter.joined_seconds
        record.restarted(waited)
        answer = await self._batcher.dispatch(request, reply, record)
        if answer.status == 200 and answer.usage is not None:
            seconds = self._clock() - started - (record.queue_seconds - waited)
            sizes.answered_alone(inputs, answer.usage.prompt_tokens, seconds)
        elif isolated and answer.status >= 400:
            self._quarantine.add(waiter.client, self._clock())
        return answer

    async def _deliver(
        self, waiter: EmbeddingWaiter, outcome: BufferedResponse | list[Vectors], reply: ClientTarget
    ) -> UpstreamResult:
        record, reused = waiter.record, waiter.record.reused_inputs
        others = "" if reused is None else f"x-gateway-reused-inputs: {reused}\r\n"
        if isinstance(outcome, BufferedResponse):
            reply.set_backend_headers(self._batcher.headers(waiter, others))
            reply.send(outcome.status, outcome.content_type, outcome.headers, outcome.body)
            return UpstreamResult(outcome.status, None, record.first_byte_seconds)
        vectors, floats = waiter.vectors(outcome), waiter.inputs.wants_floats
        document, data, tokens = vectors.document, vectors.data, vectors.prompt_tokens
        written = answer_pieces(waiter.request.request_id, document, data, tokens, floats=floats)
        usage = f"x-gateway-usage: {'exact' if vectors.exact else 'estimated'}\r\n"
        with Holding(self._batcher.memory) as holding:
            holding.add(size_of(data, floats=False))
            return await self._batcher.deliver(
                reply, waiter, tokens, usage + others, written, size_of(data, floats=floats)
            )
