"""Many small embeddings requests become few full batches, and long lists are spread over replicas. The asyncio side.

Each client's request waits in its own task. Batches run in tasks of their own, because they outlive any one of their
waiters; a batch without waiters is aborted.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from gateway.embeddings.batches import BatchesInFlight, Quarantine, TokenCounts, network_of
from gateway.embeddings.batching import BatchKey, BatchRules, PendingBatch, SentBatch
from gateway.embeddings.cache import EmbeddingCache
from gateway.embeddings.delivery import BufferedResponse, ClientTarget, deliver
from gateway.embeddings.services import PoolServices
from gateway.embeddings.sizes import ModelSizes
from gateway.embeddings.waiter import SendUnchanged, Waiter
from gateway.embeddings.wire import Vectors, answer_pieces, size_of
from gateway.observe.record import Record
from gateway.request import EmbeddingInputs, InferenceRequest, UpstreamResult, Usage
from gateway.resources import Holding
from gateway.routing.engine import Engine

_FEW_ITEMS = 8  # a request of more, or of more tokens than the next, is bulk
_FEW_TOKENS = 1024
_WORK = "embeddings"  # in errors


class Coalescer:
    """Answers embeddings requests. Owner of those that wait for a batch.

    `crowded`: how many requests wait for a place on a model's backends.
    """

    def __init__(
        self,
        services: PoolServices,
        new_id: Callable[[], str],
        *,
        crowded: Callable[[str], int],
        token_counts: TokenCounts,
        cache: EmbeddingCache | None = None,
    ) -> None:
        self._services = services
        self._dispatch = services.dispatch
        self._config = services.config
        self._metrics = services.metrics
        self._clock = services.clock
        self._waitlist = services.waitlist
        self._crowded = crowded
        self._cache = cache
        self._in_flight = BatchesInFlight(services, new_id, token_counts, self._ended)
        self._pending: dict[BatchKey, PendingBatch] = {}
        self._sizes: dict[str, ModelSizes] = {}
        self._quarantine = Quarantine()
        self._present = 0  # waiters

    def __repr__(self) -> str:
        counts = f"{self._present} requests, {len(self._pending)} pending batches, {len(self._in_flight)} in flight"
        return f"<Coalescer {counts}>"

    @property
    def busy(self) -> int:
        """Requests and batches; 0 when the coalescer is at rest."""
        return self._present + len(self._waitlist) + len(self._pending) + len(self._in_flight)

    async def dispatch(self, request: InferenceRequest, reply: ClientTarget, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with `inputs`."""
        inputs, model = request.inputs, request.demand.model
        engines = self._services.fleet.candidates(model)
        assert inputs is not None
        now = self._clock()
        client = request.demand.tenant or f"address {network_of(reply.address)}"
        lookup = None
        if self._cache is not None and engines is not None and not request.explains:
            lookup = self._cache.find(model, inputs)
            if lookup is not None and lookup.document is not None:  # nothing is missing: no backend is needed
                hit = lookup.waiter(request, client, record, now, [])
                return await self._deliver(hit, lookup.completed(Vectors(lookup.document, [], 0)), reply)
        if request.explains or not engines:
            return await self._dispatch(request, reply, record)
        sizes = self._sizes_of(model, engines)
        tokens = sizes.tokens_of(inputs)
        if sizes.may_be_too_long(tokens):
            answer = await self._dispatch(request, reply, record)
            if answer.status == 200 and answer.usage is not None:  # it was not: sizes may have been learned wrongly
                size_bytes, used = sum(inputs.sizes_bytes), answer.usage.prompt_tokens
                sizes.learn_tokens(len(inputs.items), size_bytes, used, are_ids=inputs.are_ids)
            return answer
        if lookup is not None:  # what is cached is not sent
            tokens = [tokens[place] for place in lookup.missing]
        bulk, quarantined = _is_bulk(request, tokens), self._quarantine.has(client, now)
        pending = self._pending_for(request, inputs, sizes, bulk=bulk, quarantined=quarantined)
        if lookup is None:
            waiter = Waiter(request, inputs, client, record, now)
        else:
            waiter = lookup.waiter(request, client, record, now, tokens)
        with self._joined(pending, waiter, tokens):
            outcome = await waiter.wait(self._waitlist)
            if isinstance(outcome, SendUnchanged) and not outcome.isolated:  # it keeps the place of its batch
                return await self._send_unchanged(waiter, sizes, reply, isolated=False)
        if isinstance(outcome, SendUnchanged):
            return await self._send_unchanged(waiter, sizes, reply, isolated=True)
        return await self._deliver(waiter, outcome, reply)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send batches while the block runs; those in flight then are aborted."""
        try:
            yield
        finally:
            await self._in_flight.close()

    # Joining and leaving.

    def _sizes_of(self, model: str, engines: Sequence[Engine]) -> ModelSizes:
        sizes = self._sizes.get(model)
        if sizes is None:
            callbacks = partial(self._next_bulk_items, model), partial(self._look_at_bulk, model)
            sizes = self._sizes[model] = self._services.new_sizes(model, *callbacks)
        self._services.update(model, sizes, engines)
        return sizes

    def _pending_for(
        self, request: InferenceRequest, inputs: EmbeddingInputs, sizes: ModelSizes, *, bulk: bool, quarantined: bool
    ) -> PendingBatch:
        """The batch that it may join. Raises QueueFull if it would have to wait, and the queue is full."""
        demand = request.demand
        key = BatchKey(demand.model, inputs.template, inputs.are_ids, inputs.isolation, demand.batch, bulk, quarantined)
        pending = self._pending.get(key) or PendingBatch(key, sizes, self._look)
        if pending.makes_wait(crowded=self._crowded(key.model) > 0):
            self._waitlist.refuse_if_full(request, _WORK)
        self._pending[key] = pending
        return pending

    @contextmanager
    def _joined(self, pending: PendingBatch, waiter: Waiter, tokens: list[int]) -> Iterator[None]:
        """Have the waiter's pieces sent while the block runs."""
        services, sizes, demand = self._services, pending.sizes, waiter.request.demand
        ranges = services.cut(tokens, sizes, sizes.most_items(self._config.max_batch_items))
        if len(ranges) > 1:
            self._metrics.splits.add((demand.model,))
        pieces = services.pieces_of(demand, ranges, tokens, waiter.inputs.sizes_bytes, waiter)
        waiter.split_into(pieces, self._waitlist.leave)
        self._present += 1
        for piece in pieces:
            pending.join(piece)
        try:
            pending.look_soon()
            yield
        finally:
            self._present -= 1
            for piece in waiter.release():
                if not pending.queue.leave(piece):
                    self._in_flight.leave(piece)
            pending.look_soon()

    # When to send.

    def _look(self, pending: PendingBatch) -> None:
        now, key, sizes, config = self._clock(), pending.key, pending.sizes, self._config
        pending.looked()
        max_items = min(sizes.most_items(config.max_batch_items), sizes.limit)
        crowded = self._crowded(key.model) > 0
        delay = config.max_delay_seconds
        rules = BatchRules(max_items, config.max_batch_tokens, delay, sizes.slots, sizes.overhead_seconds, crowded)
        while (reason := pending.due(now, rules)) and pending.has_slots():
            batch = pending.take(now, rules)
            self._metrics.flushes.add((key.model, reason.value))
            self._in_flight.start(batch, now)
            if key.bulk and self._pending.get(key) is pending:
                self._pending[key] = self._pending.pop(key)  # when slots come free, the others look first
        if pending.is_idle:
            if self._pending.get(key) is pending:  # and not another that has come since
                del self._pending[key]
            return
        seconds = pending.next_look_seconds(now, delay)
        if seconds is not None:
            pending.look_in(seconds)

    def _ended(self, batch: SentBatch) -> None:
        """A batch is over: what waits may go now."""
        batch.pending.ended(batch)
        batch.pending.look_soon()

    def _waiting_bulk(self, model: str) -> Iterator[PendingBatch]:
        return (each for each in self._pending.values() if each.key.bulk and each.key.model == model and each.queue)

    def _next_bulk_items(self, model: str) -> int:
        return max((pending.queue.next_items for pending in self._waiting_bulk(model)), default=0)

    def _look_at_bulk(self, model: str) -> None:
        for pending in self._waiting_bulk(model):
            pending.look_soon()

    # Answering.

    async def _send_unchanged(
        self, waiter: Waiter, sizes: ModelSizes, reply: ClientTarget, *, isolated: bool
    ) -> UpstreamResult:
        """Send the request as it came. `isolated`: a batch that it was part of was refused."""
        started, request, inputs, record = self._clock(), waiter.request, waiter.request.inputs, waiter.record
        assert inputs is not None
        if self._services.response_headers:
            reply.add_headers(b"x-gateway-usage: exact\r\n")
        waited = started - waiter.joined_seconds
        record.restarted(waited)
        answer = await self._dispatch(request, reply, record)
        if answer.status == 200 and answer.usage is not None:
            seconds = self._clock() - started - (record.queue_seconds - waited)
            sizes.answered(
                len(inputs.items), sum(inputs.sizes_bytes), answer.usage.prompt_tokens, seconds, are_ids=inputs.are_ids
            )
        elif isolated and answer.status >= 400:
            self._quarantine.add(waiter.client, self._clock())
        return answer

    async def _deliver(
        self, waiter: Waiter, outcome: BufferedResponse | Vectors, reply: ClientTarget
    ) -> UpstreamResult:
        others = ""
        if isinstance(outcome, Vectors):
            others = f"x-gateway-usage: {'exact' if outcome.exact else 'estimated'}\r\n"
        if (reused := waiter.record.reused_inputs) is not None:
            others += f"x-gateway-reused-inputs: {reused}\r\n"
        reply.set_backend_headers(self._services.headers(waiter.backends, waiter.queue_seconds, others))
        if isinstance(outcome, BufferedResponse):
            reply.send(outcome.status, outcome.content_type, outcome.headers, outcome.body)
            return UpstreamResult(outcome.status, None, waiter.first_byte_seconds)
        request_id, floats, tokens = waiter.request.request_id, waiter.inputs.wants_floats, outcome.prompt_tokens
        written = answer_pieces(request_id, outcome.document, outcome.data, tokens, floats=floats)
        waiter.record.counted(tokens)
        with Holding(self._services.memory) as holding:
            holding.add(size_of(outcome.data, floats=False))
            await deliver(reply, written, size_of(outcome.data, floats=floats))
        return UpstreamResult(200, Usage(tokens, 0), waiter.first_byte_seconds)


def _is_bulk(request: InferenceRequest, tokens: list[int]) -> bool:
    """Whether short requests should not have to wait for it."""
    return request.demand.batch or len(tokens) > _FEW_ITEMS or sum(tokens) > _FEW_TOKENS
