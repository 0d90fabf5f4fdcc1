"""Batches in flight: sent like any request, under the same rules; the answer is divided among the waiters.

While a backend works on a batch, the model's tokenizer counts each waiter's tokens. Clients whose requests spoiled a
batch are quarantined: for a while they share batches only with each other. Without a tenant, a client is an address,
which may stand for many clients behind a proxy.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import IPv6Address
from typing import Any

import orjson
import structlog

from gateway.embeddings.batching import SentBatch
from gateway.embeddings.delivery import BufferedResponse
from gateway.embeddings.fair_queue import Piece
from gateway.embeddings.services import PoolServices
from gateway.embeddings.waiter import SendUnchanged, Waiter
from gateway.embeddings.wire import body_of, most_bytes, name_of_piece, read_vectors, shares
from gateway.errors import BackendError, Draining, GatewayError, InternalError
from gateway.observe.metrics import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.request import SEVERAL_TENANTS, Demand, InferenceRequest, Kind, most_prompt_tokens
from gateway.resources import Holding
from gateway.tokenization.tokenization import NotCounted, Tokenization

# Fields that do not change the tokens of a text, or are applied here.
_KNOWN = frozenset((
    "model", "encoding_format", "dimensions", "use_activation", "priority", "cache_salt", "add_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "input",
))  # fmt: skip


_Count = asyncio.Task[list[int] | NotCounted]  # of the tokens of each text of a batch


class TokenCounts:
    """Counts the tokens of shared batches; for a request alone, the backend reports its usage."""

    def __init__(self, tokenization: Tokenization, metrics: EmbeddingMetrics) -> None:
        self._tokenization = tokenization
        self._metrics = metrics

    @contextmanager
    def counting(self, batch: SentBatch) -> Iterator[_Count | None]:
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
        """The tokens of each text, in bounded time."""
        key = batch.key
        fields: dict[str, Any] = orjson.loads(key.template + b"0}")
        most = fields.get("truncate_prompt_tokens")
        if most == -1:
            most = batch.sizes.context_tokens or 0
        if not fields.keys() <= _KNOWN or (most is not None and most <= 0):
            return NotCounted.FIELDS
        texts: list[Any] = [item for piece in batch.pieces for item in piece.owner.inputs.items]
        size_bytes, special = batch.size_bytes, fields.get("add_special_tokens", True)
        counts = await self._tokenization.count(key.model, texts, size_bytes, special=special)
        if isinstance(counts, NotCounted) or most is None:
            return counts
        return [min(count, most) for count in counts]

    def checked(self, batch: SentBatch, counts: list[int] | NotCounted, total: int, backend: str) -> list[int] | None:
        """The tokens of each text, if they are those of the backend that answered, which reports this sum."""
        model, result = batch.key.model, "counted"
        if isinstance(counts, NotCounted):
            result = counts.value
        elif not self._tokenization.counts_alike(
            model, backend
        ):  # the backend came or restarted while the batch waited
            result = NotCounted.UNVERIFIED.value
        elif sum(counts) != total:
            result = "differs"
        self._metrics.counted.add((model, result))
        return None if result != "counted" or isinstance(counts, NotCounted) else counts


def sums_by_piece(pieces: list[Piece[Waiter]], counts: list[int]) -> list[int]:
    """The tokens of each piece, from those of each input."""
    remaining = iter(counts)
    return [sum(next(remaining) for _ in range(piece.items)) for piece in pieces]


_HANDED_OUT_BYTES = 262144  # of an answer in one turn of the loop: each client then writes its own


class BatchesInFlight:
    """Owner of the batches in flight. `on_end` is called when one is over, however it ended."""

    def __init__(
        self,
        services: PoolServices,
        new_id: Callable[[], str],
        token_counts: TokenCounts,
        on_end: Callable[[SentBatch], None],
    ) -> None:
        self._dispatch = services.dispatch
        self._metrics = services.metrics
        self._clock = services.clock
        self._memory = services.memory
        self._new_id = new_id
        self._token_counts = token_counts
        self._on_end = on_end
        self._of: dict[Piece[Waiter], SentBatch] = {}  # of clients that still wait
        self._present: dict[SentBatch, int] = {}  # pieces whose clients still wait, of each batch that is not over
        self._tasks: dict[SentBatch, asyncio.Task[None]] = {}  # none where the waiter sends the request itself
        self._log = structlog.get_logger("gateway")

    def __len__(self) -> int:
        return len(self._tasks) + len(self._of)

    def start(self, batch: SentBatch, now: float) -> None:
        """Send a batch. A single request in the form that backends are sent anyway goes out unchanged."""
        pieces, model = batch.pieces, (batch.key.model,)
        self._metrics.batch_items.observe(model, batch.items)
        self._metrics.batch_tokens.observe(model, sum(piece.tokens for piece in pieces))
        self._present[batch] = len(pieces)
        for piece in pieces:
            self._metrics.batch_wait.observe(model, now - piece.joined_seconds)
            self._of[piece] = batch
            piece.owner.piece_sent()
        first = pieces[0].owner
        if len(pieces) == 1 and first.sendable_unchanged:
            first.finish(SendUnchanged(isolated=False))
            return
        task = self._tasks[batch] = asyncio.get_running_loop().create_task(self._run(batch, now))
        task.add_done_callback(lambda task: self._done(task, batch))

    def leave(self, piece: Piece[Waiter]) -> None:
        """The piece's client does not wait any more. A batch without waiting clients is aborted."""
        batch = self._of.pop(piece, None)
        if batch is None:
            return
        self._present[batch] -= 1
        if self._present[batch]:
            return
        task = self._tasks.get(batch)
        if task is None:
            self._end(batch)
        else:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, batch: SentBatch) -> None:
        del self._present[batch]
        self._on_end(batch)

    def _done(self, task: asyncio.Task[None], batch: SentBatch) -> None:
        """The batch is over: here, and not in its task, because one that is aborted early never runs."""
        del self._tasks[batch]
        for piece in batch.pieces:
            self._of.pop(piece, None)
            if task.cancelled():
                piece.owner.failed(Draining("The gateway is shutting down."))  # clients that still wait
        self._end(batch)

    async def _run(self, batch: SentBatch, started: float) -> None:
        refusal = await self._refusal(batch, started)
        if refusal is None:
            return
        if len(batch.pieces) > 1:  # refused for its content, and any piece may be the cause
            self._metrics.isolations.add((batch.key.model,))
            await self._isolate(batch)
        else:
            batch.pieces[0].owner.finish(refusal)

    async def _isolate(self, batch: SentBatch) -> None:
        """Find the pieces that spoil a refused batch by halves, and answer the others.

        With one such piece, that takes a request for each halving, and one for all that were not in any of these.
        """
        bad, rest, finds_first = [batch.pieces], list[Piece[Waiter]](), True
        while bad:
            pieces = bad.pop()
            first, second = pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
            if not first:
                second[0].owner.finish(SendUnchanged(isolated=True))
            elif not await self._refuses(batch, first):
                bad.append(second)
            else:
                bad.append(first)
                if finds_first:
                    rest += second
                elif await self._refuses(batch, second):
                    bad.append(second)
            if not bad and rest:
                finds_first = False
                bad, rest = ([rest] if await self._refuses(batch, rest) else []), []

    async def _refuses(self, batch: SentBatch, pieces: list[Piece[Waiter]]) -> bool:
        """Whether a backend refuses these pieces of a batch; else they are answered, or have failed."""
        pieces = [piece for piece in pieces if piece in self._of]  # those whose clients still wait
        return bool(pieces) and await self._refusal(SentBatch(batch.pending, pieces), self._clock()) is not None

    async def _refusal(self, batch: SentBatch, started: float) -> BufferedResponse | None:
        """Send a batch and hand out its answer; else what a backend says if it refuses the content."""
        request = self._request(batch)
        record = Record(request.request_id, request.endpoint, started)
        try:
            with Holding(self._memory) as holding, self._token_counts.counting(batch) as count:
                response = BufferedResponse(most_bytes(batch.items), holding)
                async with response.filling():
                    await self._dispatch(request, response, record)
                self._note(batch, record, started)
                if response.status != 200:
                    return response
                await self._hand_out(batch, response.body, count, record, started)
        except GatewayError as error:
            self._note(batch, record, started)
            self._fail(batch, error)
        except Exception as error:
            self._log.exception("internal_error", request_id=request.request_id, endpoint=request.endpoint)
            self._fail(batch, InternalError(f"Internal error of the gateway ({type(error).__name__})."))
        return None

    def _fail(self, batch: SentBatch, error: GatewayError) -> None:
        if isinstance(error, BackendError) and len(batch.pieces) > 1:
            error.answer = None  # its words may quote the inputs of others
        for piece in batch.pieces:
            piece.owner.failed(error)

    def _request(self, batch: SentBatch) -> InferenceRequest:
        pieces, first = batch.pieces, batch.pieces[0].owner
        request, items = first.request, first.inputs.items
        name, headers = request.request_id, request.headers
        if len(pieces) > 1:
            name = self._new_id()
            items = [item for piece in pieces for item in piece.owner.inputs.items]  # type: ignore[assignment]
            headers = b"x-request-id: %b\r\n" % name.encode()
        elif not first.whole:
            start = pieces[0].start
            name, headers = name_of_piece(request, str(start))
            items = items[start : start + pieces[0].items]
        body = body_of(batch.key.template, items)
        demand = self._demand(batch, len(body))
        return InferenceRequest(
            request.endpoint, Kind.POOL, request.method, request.target, demand, name, body=body, headers=headers
        )

    def _demand(self, batch: SentBatch, size_bytes: int) -> Demand:
        """The batch queues as its tenant, or as all of them together."""
        weights = {piece.tenant: piece.weight for piece in batch.pieces}
        deadlines = [piece.owner.request.demand.deadline_seconds for piece in batch.pieces]
        latest = max((at for at in deadlines if at is not None), default=None)
        return Demand(
            batch.key.model,
            sequences=batch.items,
            divisible=True,
            output_tokens=0,
            size_bytes=size_bytes,
            tenant=next(iter(weights)) if len(weights) == 1 else SEVERAL_TENANTS,
            weight=sum(weights.values()),
            batch=batch.key.batch,
            deadline_seconds=None if None in deadlines else latest,
        )

    def _note(self, batch: SentBatch, record: Record, started: float) -> None:
        for piece in batch.pieces:
            piece.owner.batch_ended(record, started - piece.joined_seconds)

    async def _hand_out(
        self, batch: SentBatch, body: bytes, count: _Count | None, record: Record, since: float
    ) -> None:
        pieces, seconds = batch.pieces, self._clock() - since - record.queue_seconds
        vectors = read_vectors(body, batch.items)
        batch.sizes.learn_answer_size(batch.items, len(body))
        are_ids, size_bytes = batch.key.are_ids, batch.size_bytes
        tokens = min(vectors.prompt_tokens, most_prompt_tokens(batch.items, size_bytes))
        batch.sizes.answered(batch.items, size_bytes, tokens, seconds, are_ids=are_ids)
        weights = [piece.tokens for piece in pieces]
        counts = None
        if count is not None:
            counts = self._token_counts.checked(batch, await count, tokens, record.backend)
        if counts is not None:
            vectors, weights = replace(vectors, counts=counts), sums_by_piece(pieces, counts)
        exact = len(pieces) == 1 or ((are_ids or counts is not None) and sum(weights) == tokens)
        offset = handed_out = 0
        for piece, share in zip(pieces, shares(tokens, weights), strict=True):
            piece.owner.answered(piece, vectors, offset, share, exact=exact)
            offset += piece.items
            handed_out += piece.items * len(body) // batch.items
            if handed_out > _HANDED_OUT_BYTES:
                handed_out = 0
                await asyncio.sleep(0)


_QUARANTINE_SECONDS = 10.0
_MOST_CLIENTS = 1024


class Quarantine:
    """The clients whose requests spoiled a batch lately, and when that ends for each."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # soonest first

    def __len__(self) -> int:
        return len(self._until)

    def add(self, client: str, now: float) -> None:
        self._until.pop(client, None)
        if len(self._until) >= _MOST_CLIENTS:
            del self._until[next(iter(self._until))]
        self._until[client] = now + _QUARANTINE_SECONDS

    def has(self, client: str, now: float) -> bool:
        while self._until:
            first = next(iter(self._until))
            if self._until[first] > now:
                break
            del self._until[first]
        return client in self._until


def network_of(address: str) -> str:
    """The address of a client without a name, or the /64 that IPv6 gives to each."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])
