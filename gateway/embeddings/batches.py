"""Batches in flight: sent like any request, under the same rules; the answer is shared out to the members.

While a backend works on a batch, the model's tokenizer counts each member's tokens. Clients whose requests made a batch
fail share batches only with each other for a while; an address may stand for many clients behind a proxy.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv6Address
from types import TracebackType
from typing import Any, Self

import orjson
import structlog

from gateway.dispatch import Dispatcher
from gateway.embeddings.batching import Flight
from gateway.embeddings.delivery import Collected
from gateway.embeddings.members import ByItself, Member, Part, Refused
from gateway.embeddings.wire import body_of, most_bytes, read_vectors, shares
from gateway.errors import BackendError, Draining, GatewayError, InternalError
from gateway.observe.metrics import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.request import SEVERAL_TENANTS, Ask, InferenceRequest, Kind, most_prompt_tokens
from gateway.resources import Holding, MemoryBudget
from gateway.tokenization.tokenization import NotCounted, Tokenization

# Fields that leave a text's tokens as they are, or are heeded here.
_KNOWN = frozenset((
    "model", "encoding_format", "dimensions", "use_activation", "priority", "cache_salt", "add_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "input",
))  # fmt: skip


class TokenCounts:
    """Has batches counted that are shared. Who is alone is told its usage by the backend."""

    def __init__(self, tokenization: Tokenization, metrics: EmbeddingMetrics) -> None:
        self._tokenization = tokenization
        self._metrics = metrics

    def counting(self, flight: Flight) -> "BatchCounting":
        """Have a batch counted while the block runs, if it should and can be."""
        key = flight.group.key
        wanted = len(flight.parts) > 1 and not key.are_ids and self._tokenization.configured(key.model)
        return BatchCounting(self, flight, wanted=wanted)

    async def of_texts(self, flight: Flight) -> list[int] | NotCounted:
        """The tokens of each text, in bounded time."""
        key = flight.group.key
        fields: dict[str, Any] = orjson.loads(key.template + b"0}")
        most = fields.get("truncate_prompt_tokens")
        if most == -1:
            most = flight.group.sizes.context_tokens or 0
        if not fields.keys() <= _KNOWN or (most is not None and most <= 0):
            return NotCounted.FIELDS
        texts = [item for part in flight.parts for item in part.owner.inputs.items]
        size_bytes, special = sum(part.size_bytes for part in flight.parts), fields.get("add_special_tokens", True)
        counts = await self._tokenization.count(key.model, texts, size_bytes, special=special)
        if isinstance(counts, NotCounted) or most is None:
            return counts
        return [min(count, most) for count in counts]

    def checked(self, flight: Flight, counts: list[int] | NotCounted, total: int, backend: str) -> list[int] | None:
        """The tokens of each text, if they are those of the backend that answered, which reports this sum."""
        model, result = flight.group.key.model, "counted"
        if isinstance(counts, NotCounted):
            result = counts.value
        elif not self._tokenization.counts_alike(model, backend):  # it came or restarted while the batch waited
            result = NotCounted.UNVERIFIED.value
        elif sum(counts) != total:
            result = "differs"
        self._metrics.counted.add((model, result))
        return None if result != "counted" or isinstance(counts, NotCounted) else counts


class BatchCounting:
    """One batch being counted; given up with its block."""

    def __init__(self, owner: TokenCounts, flight: Flight, *, wanted: bool) -> None:
        self._owner = owner
        self._flight = flight
        self._task = asyncio.get_running_loop().create_task(owner.of_texts(flight)) if wanted else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    async def counts(self, total: int, backend: str) -> list[int] | None:
        """The tokens of each text, which add up to what this backend reports; None = they are not known."""
        if self._task is None:
            return None
        return self._owner.checked(self._flight, await self._task, total, backend)


def sums_by_part(parts: list[Part], counts: list[int]) -> list[int]:
    """The tokens of each part, from those of each input."""
    remaining = iter(counts)
    return [sum(next(remaining) for _ in range(part.items)) for part in parts]


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


_SECONDS = 10.0
_MOST = 1024


class Suspects:
    """Who is kept apart, and until when."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # soonest first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, client: str, now: float) -> None:
        """This client's request was refused after it had spoilt a batch."""
        self._until.pop(client, None)
        if len(self._until) >= _MOST:
            del self._until[next(iter(self._until))]
        self._until[client] = now + _SECONDS

    def holds(self, client: str, now: float) -> bool:
        """Whether this client is kept apart now."""
        while self._until:
            first = next(iter(self._until))
            if self._until[first] > now:
                break
            del self._until[first]
        return client in self._until


def network_of(address: str) -> str:
    """What stands for a client without a name: its address, or the /64 that IPv6 gives to each."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])
