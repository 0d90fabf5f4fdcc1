"""Batches under way: sent like any request, under the same rules; what comes back is shared out to the members."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from gateway.dispatch import Dispatcher
from gateway.embeddings.answer import most_bytes, read_vectors
from gateway.embeddings.collected import Collected
from gateway.embeddings.group import Flight
from gateway.embeddings.grouping import body_of
from gateway.embeddings.member import ByItself, Member, Refused
from gateway.embeddings.part import Part
from gateway.embeddings.split import shares
from gateway.embeddings.token_counts import BatchCounting, TokenCounts, sums_by_part
from gateway.errors import BackendError, Draining, GatewayError, InternalError
from gateway.memory import Holding, MemoryBudget
from gateway.observe.embeddings import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.request import SEVERAL_TENANTS, Ask, InferenceRequest, Kind, most_prompt_tokens

_HANDED_OUT_BYTES = 262144  # of an answer in one turn of the loop, for each client then writes its own


class Flights:
    """Owner of the batches that are under way. `on_end` is called when one is over, however it ended."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: EmbeddingMetrics,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        token_counts: TokenCounts,
        memory: MemoryBudget,
    ) -> None:
        self.on_end: Callable[[Flight], None] = lambda _: None
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id
        self._token_counts = token_counts
        self._memory = memory
        self._of: dict[Part, Flight] = {}  # of clients who still wait
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("gateway")

    def __len__(self) -> int:
        return len(self._tasks) + len(self._of)

    def start(self, flight: Flight, now: float) -> None:
        """Send a batch. One request that wants what backends are asked for anyway is sent as it came."""
        parts, model = flight.parts, (flight.group.key.model,)
        self._metrics.batch_items.observe(model, flight.items)
        self._metrics.batch_tokens.observe(model, sum(part.tokens for part in parts))
        flight.present = len(parts)
        for part in parts:
            self._metrics.batch_wait.observe(model, now - part.joined_seconds)
            self._of[part] = flight
            part.owner.taken()
        first: Member = parts[0].owner
        if len(parts) == 1 and first.as_it_came:
            first.ends(ByItself(isolated=False))
            return
        flight.task = asyncio.get_running_loop().create_task(self._fly(flight, now))
        self._tasks.add(flight.task)
        flight.task.add_done_callback(lambda task: self._landed(task, flight))

    def leave(self, part: Part) -> None:
        """The part's client does not wait any more. A batch that nobody waits for is aborted."""
        flight = self._of.pop(part, None)
        if flight is None:
            return
        flight.present -= 1
        if flight.present:
            return
        if flight.task is None:
            self._end(flight)
        else:
            flight.task.cancel()

    async def close(self) -> None:
        """Abort all."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, flight: Flight) -> None:
        if not flight.ended:
            flight.ended = True
            self.on_end(flight)

    def _landed(self, task: asyncio.Task[None], flight: Flight) -> None:
        """The batch is over: here, and not in its task, because one that is aborted early never runs."""
        self._tasks.discard(task)
        for part in flight.parts:
            self._of.pop(part, None)
            if task.cancelled():
                part.owner.failed(Draining("The gateway is shutting down."))  # those who are still here
        self._end(flight)

    async def _fly(self, flight: Flight, started: float) -> None:
        refusal = await self._refusal(flight, started)
        if refusal is None:
            return
        if len(flight.parts) > 1:  # refused for what was asked, and nobody knows by whom
            self._metrics.isolations.add((flight.group.key.model,))
            await self._isolate(flight)
        else:
            flight.parts[0].owner.ends(refusal)

    async def _isolate(self, flight: Flight) -> None:
        """Find who spoils a refused batch by halves, and answer the others.

        With one to blame, that takes a request for each halving, and one for all who were not in any of these.
        """
        bad, rest, finds_first = [flight.parts], list[Part](), True
        while bad:
            parts = bad.pop()
            first, second = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            if not first:
                second[0].owner.ends(ByItself(isolated=True))
            elif not await self._refuses(flight, first):
                bad.append(second)
            else:
                bad.append(first)
                if finds_first:
                    rest += second
                elif await self._refuses(flight, second):
                    bad.append(second)
            if not bad and rest:
                finds_first = False
                bad, rest = ([rest] if await self._refuses(flight, rest) else []), []

    async def _refuses(self, flight: Flight, parts: list[Part]) -> bool:
        """Whether a backend refuses these parts of a batch; else they are answered, or have failed."""
        parts = [part for part in parts if part in self._of]  # those whose clients still wait
        return bool(parts) and await self._refusal(replace(flight, parts=parts), self._clock()) is not None

    async def _refusal(self, flight: Flight, started: float) -> Refused | None:
        """Have the batch answered: what a backend says if it refuses what is asked, else None."""
        request = self._request(flight)
        record = Record(request.request_id, request.endpoint, started)
        try:
            with Holding(self._memory) as holding, self._token_counts.counting(flight) as counting:
                sink = Collected(most_bytes(flight.items), holding)
                async with sink.filling():
                    await self._dispatcher.dispatch(request, sink, record)
                self._told(flight, record, started)
                if sink.status != 200:
                    return Refused(sink.status, sink.content_type, sink.headers, sink.body)
                await self._answered(flight, sink.body, counting, record, started)
        except GatewayError as error:
            self._told(flight, record, started)
            self._failed(flight, error)
        except Exception as error:
            self._log.exception("internal_error", request_id=request.request_id, endpoint=request.endpoint)
            self._failed(flight, InternalError(f"Internal error of the gateway ({type(error).__name__})."))
        return None

    def _failed(self, flight: Flight, error: GatewayError) -> None:
        if isinstance(error, BackendError) and len(flight.parts) > 1:
            error.answer = None  # its words may quote the inputs of others
        for part in flight.parts:
            part.owner.failed(error)

    def _request(self, flight: Flight) -> InferenceRequest:
        """What the backend is asked."""
        parts, key = flight.parts, flight.group.key
        first: Member = parts[0].owner
        request, inputs = first.request, first.inputs
        if len(parts) == 1:
            part, name = parts[0], request.request_id
            items = inputs.items if first.whole else inputs.items[part.start : part.start + part.items]
            headers = request.headers
            if not first.whole:  # engines want a name for each request
                name = f"{name[:112]}-{part.start}"
                rest = headers.partition(b"\r\n")[2]
                headers = b"x-request-id: %b\r\n%b" % (name.encode(), rest)
        else:
            name = self._new_id()
            items = [item for part in parts for item in part.owner.inputs.items]
            headers = b"x-request-id: %b\r\n" % name.encode()
        body = body_of(key.template, items)
        ask = self._ask(flight, len(body))
        return InferenceRequest(
            request.endpoint, Kind.POOL, request.method, request.target, ask, name, body=body, headers=headers
        )

    def _ask(self, flight: Flight, size_bytes: int) -> Ask:
        """How the batch stands in line: as its tenant, or as all of them together."""
        key = flight.group.key
        weights = {part.tenant: part.weight for part in flight.parts}
        deadlines = [part.owner.request.ask.deadline_seconds for part in flight.parts]
        latest = max((at for at in deadlines if at is not None), default=None)
        return Ask(
            key.model,
            sequences=flight.items,
            divisible=True,
            output_tokens=0,
            size_bytes=size_bytes,
            tenant=next(iter(weights)) if len(weights) == 1 else SEVERAL_TENANTS,
            weight=sum(weights.values()),
            batch=key.batch,
            deadline_seconds=None if None in deadlines else latest,
        )

    def _told(self, flight: Flight, record: Record, started: float) -> None:
        for part in flight.parts:
            part.owner.sent(record, started - part.joined_seconds)

    async def _answered(
        self, flight: Flight, body: bytes, counting: BatchCounting, record: Record, since: float
    ) -> None:
        parts, seconds = flight.parts, self._clock() - since - record.queue_seconds
        vectors = read_vectors(body, flight.items)
        flight.group.sizes.answer_came(flight.items, len(body))
        are_ids, size_bytes = flight.group.key.are_ids, sum(part.size_bytes for part in parts)
        tokens = min(vectors.prompt_tokens, most_prompt_tokens(flight.items, size_bytes))
        flight.group.sizes.answered(flight.items, size_bytes, tokens, seconds, are_ids=are_ids)
        weights = [part.tokens for part in parts]
        counts = await counting.counts(tokens, record.backend)
        if counts is not None:
            vectors, weights = replace(vectors, counts=counts), sums_by_part(parts, counts)
        exact = len(parts) == 1 or ((are_ids or counts is not None) and sum(weights) == tokens)
        offset = handed_out = 0
        for part, share in zip(parts, shares(tokens, weights), strict=True):
            part.owner.answered(part, vectors, offset, share, exact=exact)
            offset += part.items
            handed_out += part.items * len(body) // flight.items
            if handed_out > _HANDED_OUT_BYTES:
                handed_out = 0
                await asyncio.sleep(0)
