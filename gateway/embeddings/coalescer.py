"""Many small embeddings requests become few full batches, and long lists are spread over replicas. The asyncio side.

Each client's request waits in its own task, as a member. Batches run in tasks of their own, because they outlive any
one of their members; one that nobody waits for any more is aborted.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from gateway.backends.fleet import Fleet
from gateway.config import EmbeddingsConfig
from gateway.dispatch import Dispatcher
from gateway.embeddings.batches import Flights, Suspects, TokenCounts, network_of
from gateway.embeddings.batching import BatchGroup, Budget, Flight, GroupKey
from gateway.embeddings.cache import EmbeddingCache
from gateway.embeddings.delivery import deliver
from gateway.embeddings.members import ByItself, Member, Outcome, Part, Refused, Served, Waiting
from gateway.embeddings.sizes import BulkShares, ModelSizes
from gateway.embeddings.wire import answer_pieces, pieces, size_of, usage_of
from gateway.front.reply import Reply
from gateway.observe.metrics import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.relay.upstream import UpstreamResult
from gateway.request import EmbeddingInputs, InferenceRequest
from gateway.resources import Holding, MemoryBudget
from gateway.routing.engine import Engine
from gateway.scheduling.backlog import Backlog

_FEW_ITEMS = 8  # a request of more, or of more tokens than the next, is bulk
_FEW_TOKENS = 1024


class Coalescer:
    """Answers embeddings requests. Owner of who waits for a batch.

    `crowded` tells how many requests wait for a place on a model's backends, `retry_after` when one who is refused may
    come again.
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
        new_id: Callable[[], str],
        *,
        crowded: Callable[[str], int],
        retry_after: Callable[[str], float],
        token_counts: TokenCounts,
        memory: MemoryBudget,
        bulk: BulkShares,
        response_headers: bool,
        cache: EmbeddingCache | None = None,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._crowded = crowded
        self._response_headers = response_headers
        self._memory = memory
        self._cache = cache
        self._flights = Flights(dispatcher, metrics, clock, new_id, token_counts, memory)
        self._flights.on_end = self._ended
        self._groups: dict[GroupKey, BatchGroup] = {}
        self._bulk = bulk
        self._sizes: dict[str, ModelSizes] = {}
        self._suspects = Suspects()
        self._present = 0  # members
        self._waiting: Waiting[Member] = Waiting(  # those of whom not every part is in a batch
            backlog, max_wait_seconds, retry_after, "embeddings"
        )

    def __repr__(self) -> str:
        there = f"{self._present} requests, {len(self._waiting)} waiting"
        return f"<Coalescer {there}, {len(self._groups)} groups, {len(self._flights)} batches>"

    @property
    def busy(self) -> int:
        """Requests, groups and batches that are there; nothing, when all is at rest."""
        return self._present + len(self._waiting) + len(self._groups) + len(self._flights)

    async def dispatch(self, request: InferenceRequest, reply: Reply, record: Record) -> UpstreamResult:
        """Answer the request through `reply`, as `Dispatcher.dispatch` does. Only for requests with `inputs`."""
        inputs, engines = request.inputs, self._fleet.candidates(request.ask.model)
        assert inputs is not None
        now = self._clock()
        client = request.ask.tenant or f"address {network_of(reply.address)}"
        lookup = None
        if self._cache is not None and engines is not None and not request.explains:
            lookup = self._cache.find(request.ask.model, inputs)
            if lookup is not None and lookup.document is not None:  # nothing is missing: no backend is needed
                hit = lookup.member(request, client, record, now, [])
                return await self._deliver(hit, lookup.completed(Served(lookup.document, [], 0, True)), reply)
        if request.explains or not engines:
            return await self._dispatcher.dispatch(request, reply, record)
        sizes = self._sizes_of(request.ask.model, engines)
        tokens = sizes.tokens_of(inputs)
        if sizes.may_be_too_long(tokens):
            answer = await self._dispatcher.dispatch(request, reply, record)
            if answer.status == 200 and answer.usage is not None:  # it was not: sizes may have been learned wrongly
                sizes.learn_tokens(inputs, answer.usage.prompt_tokens)
            return answer
        if lookup is not None:  # what is cached is not sent
            tokens = [tokens[place] for place in lookup.missing]
        bulk = _is_bulk(request, tokens)
        group = self._group(request, inputs, sizes, bulk=bulk, suspect=self._suspects.holds(client, now))
        if lookup is None:
            member = Member(request, inputs, client, record, now)
        else:
            member = lookup.member(request, client, record, now, tokens)
        member.consists_of(self._parts(member, sizes, tokens))
        with self._joined(group, member, bulk=bulk):
            outcome = await self._outcome(member)
            if isinstance(outcome, ByItself) and not outcome.isolated:  # the place of its batch is its own
                return await self._by_itself(member, sizes, reply, isolated=False)
        if isinstance(outcome, ByItself):
            return await self._by_itself(member, sizes, reply, isolated=True)
        return await self._deliver(member, outcome, reply)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send batches while the block runs; those that are under way then are given up."""
        try:
            yield
        finally:
            await self._flights.close()

    # Joining and leaving.

    def _sizes_of(self, model: str, engines: list[Engine]) -> ModelSizes:
        sizes = self._sizes.get(model)
        if sizes is None:
            slots = self._bulk.of(model)
            bulk = slots.joined(partial(self._next_bulk_items, model), partial(self._look_at_bulk, model))
            sizes = self._sizes[model] = ModelSizes(bulk)
        sizes.learn_engines(model, engines, self._fleet.serving(model) or ())
        return sizes

    def _parts(self, member: Member, sizes: ModelSizes, tokens: list[int]) -> list[Part]:
        config, ask, bytes_of = self._config, member.request.ask, member.inputs.sizes_bytes
        max_items = sizes.most_items(config.max_batch_items)
        ranges = pieces(tokens, min(max_items, sizes.cap), config.max_batch_tokens)
        if len(ranges) > 1:
            most = sizes.piece_items(max_items)
            ranges = pieces(tokens, most, config.max_batch_tokens, sizes.replicas)
            self._metrics.splits.add((ask.model,))
        return [
            Part(
                member, each.start, len(each), sum(tokens[each.start : each.stop]),
                sum(bytes_of[each.start : each.stop]), ask.tenant, ask.weight, alone=len(ranges) > 1,
            )
            for each in ranges
        ]  # fmt: skip

    def _group(
        self, request: InferenceRequest, inputs: EmbeddingInputs, sizes: ModelSizes, *, bulk: bool, suspect: bool
    ) -> BatchGroup:
        """Those with whom it may share batches. Raises QueueFull if it would have to wait, and no more may."""
        key = GroupKey(request.ask.model, inputs.template, inputs.are_ids, inputs.isolation, request.ask.batch, suspect)
        group = self._groups.get(key) or BatchGroup(key, sizes)
        if group.makes_wait(group.gathering(bulk=bulk), crowded=self._crowded(key.model) > 0):
            self._waiting.refuse_if_full(request)
        self._groups[key] = group
        return group

    @contextmanager
    def _joined(self, group: BatchGroup, member: Member, *, bulk: bool) -> Iterator[None]:
        """Have the member's parts sent while the block runs."""
        now, gathering = self._clock(), group.gathering(bulk=bulk)
        self._present += 1
        self._waiting.join(member, member.request)
        member.on_taken = self._waiting.leave
        for part in member.parts:
            gathering.join(part, now)
        try:
            self._look_soon(group)
            yield
        finally:
            self._present -= 1
            self._waiting.leave(member)
            for part in member.leaves():
                if not gathering.lane.leave(part):
                    self._flights.leave(part)
            self._look_soon(group)

    # When to send.

    def _look_soon(self, group: BatchGroup) -> None:
        """Look at the group at the end of this turn of the loop, once for all that come in it."""
        if group.look is None:
            group.look = asyncio.get_running_loop().call_soon(self._look, group)

    def _look(self, group: BatchGroup) -> None:
        now, key = self._clock(), group.key
        group.looked()
        around = group.surroundings(crowded=self._crowded(key.model) > 0)
        config = self._config
        max_items = min(group.sizes.most_items(config.max_batch_items), group.sizes.limit)
        budget = Budget(max_items, config.max_batch_tokens, config.max_delay_seconds)
        for gathering in (group.interactive, group.bulk):
            while (reason := gathering.due(now, budget, around)) and group.has_room(gathering):
                flight = group.take(gathering, now, budget)
                self._metrics.flushes.add((key.model, reason.value))
                self._flights.start(flight, now)
                if gathering is group.bulk and self._groups.get(key) is group:
                    self._groups[key] = self._groups.pop(key)  # when slots come free, the others look first
        if group.quiet:
            if self._groups.get(key) is group:  # and not another that has come since
                del self._groups[key]
            return
        at = group.look_again_seconds(now, budget)
        if at is not None:
            group.timer = asyncio.get_running_loop().call_later(at - now, self._look_soon, group)

    def _ended(self, flight: Flight) -> None:
        """A batch is over: what waits may go now."""
        flight.group.ended(flight)
        self._look_soon(flight.group)

    def _with_bulk(self, model: str) -> Iterator[BatchGroup]:
        return (group for group in self._groups.values() if group.key.model == model and len(group.bulk.lane))

    def _next_bulk_items(self, model: str) -> int:
        return max((group.bulk.lane.next_items for group in self._with_bulk(model)), default=0)

    def _look_at_bulk(self, model: str) -> None:
        for group in self._with_bulk(model):
            self._look_soon(group)

    # Answering.

    async def _outcome(self, member: Member) -> Outcome:
        """What comes of the member's parts. Raises WaitExpired if one of them is in no batch in time."""
        async with self._waiting.in_time(member.request, member.joined_seconds) as member.waits:
            try:
                return await member.outcome
            finally:
                member.tell_record()

    async def _by_itself(self, member: Member, sizes: ModelSizes, reply: Reply, *, isolated: bool) -> UpstreamResult:
        """Send the request as it came. `isolated`: a batch that it was part of was refused."""
        started, request, inputs, record = self._clock(), member.request, member.request.inputs, member.record
        assert inputs is not None
        if self._response_headers:
            reply.standing += b"x-gateway-usage: exact\r\n"
        record.attempts, record.reused_inputs = 0, None
        waited = record.queue_seconds = started - member.joined_seconds
        answer = await self._dispatcher.dispatch(request, reply, record)
        if answer.status == 200 and answer.usage is not None:
            seconds = self._clock() - started - (record.queue_seconds - waited)
            sizes.answered(
                len(inputs.items), sum(inputs.sizes_bytes), answer.usage.prompt_tokens, seconds, are_ids=inputs.are_ids
            )
        elif isolated and answer.status >= 400:
            self._suspects.add(member.client, self._clock())
        return answer

    async def _deliver(self, member: Member, outcome: Refused | Served, reply: Reply) -> UpstreamResult:
        if self._response_headers:
            usage = "" if isinstance(outcome, Refused) else f"x-gateway-usage: {_kind(outcome)}\r\n"
            if (reused := member.record.reused_inputs) is not None:
                usage += f"x-gateway-reused-inputs: {reused}\r\n"
            backends = f"x-gateway-backend: {','.join(member.backends)}\r\n" if member.backends else ""
            reply.extra = (
                f"{backends}"
                f"x-gateway-queue-ms: {member.queue_seconds * 1000:.0f}\r\n"
                f"x-gateway-prefix-tokens: 0\r\n{usage}"
            ).encode()
        if isinstance(outcome, Refused):
            reply.send(outcome.status, outcome.content_type, outcome.extra, outcome.body)
            return UpstreamResult(outcome.status, None, member.first_byte_seconds)
        request_id, floats = member.request.request_id, member.inputs.wants_floats
        pieces = answer_pieces(request_id, outcome.document, outcome.data, outcome.tokens, floats=floats)
        member.record.prompt_tokens = outcome.tokens
        with Holding(self._memory) as holding:
            holding.add(size_of(outcome.data, floats=False))
            await deliver(reply, pieces, size_of(outcome.data, floats=floats))
        return UpstreamResult(200, usage_of(outcome.tokens), member.first_byte_seconds)


def _kind(outcome: Served) -> str:
    return "exact" if outcome.exact else "estimated"


def _is_bulk(request: InferenceRequest, tokens: list[int]) -> bool:
    """Whether few items of others should not have to wait for it."""
    return request.ask.batch or len(tokens) > _FEW_ITEMS or sum(tokens) > _FEW_TOKENS
