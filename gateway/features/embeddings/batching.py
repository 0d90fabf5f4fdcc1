"""When to send a batch, and with which pieces; a model's estimates: backends, tokens of texts, seconds of batches.

While few batches are in flight, waiting pieces are sent immediately; otherwise the next batch gathers until one in
flight ends, it is full, or its oldest piece has waited long enough. Short requests and long lists have separate
batches, so that short ones never wait behind long ones.

Seconds are fitted by a line through recent measurements, y = a * u + b * v, by least squares that forget.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, NamedTuple, Protocol

from gateway.config import EmbeddingsConfig
from gateway.core.backends.backend import Backend
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest, most_prompt_tokens
from gateway.core.routing.engine import Engine
from gateway.core.scheduling.fair_share import FairClock, Share
from gateway.features.embeddings.inputs import EmbeddingInputs
from gateway.features.embeddings.waiter import BufferedResponse, Piece

_MEMORY = 64.0  # measurements


class LinearFit:
    """Fits two coefficients, neither below zero, to pairs of amounts and their totals.

    Starts from a guess that counts as one measurement at each of two points, so that it is never without an answer.
    """

    __slots__ = ("_uu", "_uv", "_uy", "_vv", "_vy", "coefficients")

    def __init__(self, a: float, b: float, *, u: float = 1.0, v: float = 1.0) -> None:
        self._uu, self._uv, self._vv = u * u, 0.0, v * v
        self._uy, self._vy = a * u * u, b * v * v
        self.coefficients = a, b

    def learn(self, u: float, v: float, y: float) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self._uu = self._uu * keep + u * u
        self._uv = self._uv * keep + u * v
        self._vv = self._vv * keep + v * v
        self._uy = self._uy * keep + u * y
        self._vy = self._vy * keep + v * y
        self.coefficients = self._fitted()

    def _fitted(self) -> tuple[float, float]:
        determinant = self._uu * self._vv - self._uv * self._uv
        if determinant > 1e-9 * self._uu * self._vv:
            a = (self._uy * self._vv - self._vy * self._uv) / determinant
            b = (self._vy * self._uu - self._uy * self._uv) / determinant
            if a >= 0 and b >= 0:
                return a, b
            return (0.0, self._vy / self._vv) if a < b else (self._uy / self._uu, 0.0)
        total = self._uu + self._vv  # all points are on one line through the origin: both get the same coefficient
        shared = (self._uy + self._vy) / (total + 2 * self._uv)
        return shared, shared


_SLOTS_A_REPLICA = 4  # batches: some that the engine works on, and some that its API server reads or writes
_NEAR_THE_LIMIT = 0.8  # of the context: an estimate above this may be a text that is refused
_FEWEST_ITEMS = 8
_ANSWER_BYTES = 8388608  # of a batch: a longer one takes too long to parse
_ITEM_ANSWER_BYTES = 86016  # until the first answer: 4,096 numbers, as text
_FORGETS = 0.9
_LINE_PARTS = 4  # a call of offline lines is this much shorter than a batch may be
_LINE_CALLS = 2  # of offline lines, for each replica: sent before they are full


class ModelSizes:
    """The estimates for one model: defaults until answers arrive."""

    def __init__(self) -> None:
        self.knows_engines = False  # as they are now
        self.replicas = 1
        self.cap = 1  # of the replica with the fewest slots
        self.limit = 1  # the same for now, while backends start slowly or are overloaded
        self.bulk_share = 1  # items of long lists that may be in flight
        self.slots = _SLOTS_A_REPLICA  # batches that keep its backends busy
        self.context_tokens: int | None = None
        self._item_answer_bytes = float(_ITEM_ANSWER_BYTES)
        self._tokens = LinearFit(2.0, 0.25, u=4.0, v=400.0)  # of texts: for each, and for each byte
        self._seconds = LinearFit(0.003, 0.0003, u=1.0, v=8.0)  # of a batch: for itself, and for each item

    def learn_engines(self, model: str, engines: Sequence[Engine], backends: Iterable[Backend]) -> None:
        """Takes over the engines that serve it now; at least one."""
        self.knows_engines = True
        self.replicas, self.cap = len(engines), min(engine.cap for engine in engines)
        # A quarter of the slots is reserved for short requests. They count by the current limits, not by the caps: a
        # piece that waits behind others of its list must wait here, because `max_wait_seconds` does not count here.
        limits = [max(1, engine.slots) for engine in engines]
        self.limit, self.bulk_share = min(limits), sum(limits) - sum(limits) // 4
        self.slots = _SLOTS_A_REPLICA * self.replicas
        self.context_tokens = min(filter(None, (each.context_tokens.get(model) for each in backends)), default=None)

    def forget_engines(self) -> None:
        """The fleet or one of its limits has changed."""
        self.knows_engines = False

    @property
    def overhead_seconds(self) -> float:
        return self._seconds.coefficients[0]

    def most_items(self, max_items: int) -> int:
        """The most inputs of a batch, at most `max_items`, whose answer is parsed without a break."""
        return min(max_items, max(1, int(_ANSWER_BYTES / self._item_answer_bytes)))

    def bounds(self, config: EmbeddingsConfig, *, offline: bool) -> tuple[int, int]:
        """The most items and tokens of a batch. Calls of offline lines are short, to keep the wait behind one short:
        two of them fill half of an engine's slots, and half of an engine step."""
        items, tokens = self.most_items(config.max_batch_items), config.max_batch_tokens
        if not offline:
            return items, tokens
        return min(items, max(1, self.limit // _LINE_PARTS)), max(1, tokens // _LINE_PARTS)

    def cut(self, tokens: Sequence[int], max_items: int, max_tokens: int) -> list[range]:
        """The pieces of a list, in order, each within the limits of a batch; one, if the whole list is.

        A list that has to be cut is cut into at least as many pieces as there are replicas, if it has as many inputs.
        An input over the budget is a piece of its own.
        """
        count, total = len(tokens), sum(tokens)
        if count == 1 or (count <= min(max_items, self.cap) and total <= max_tokens):
            return [range(count)]
        most = min(max_items, self.limit, max(_FEWEST_ITEMS, self.cap // 4))  # several fit: no backend ever idles
        wanted = max(-(-count // most), -(-total // max_tokens), min(self.replicas, count))
        fair_items, fair_tokens = min(most, -(-count // wanted)), min(max_tokens, -(-total // wanted))
        cut: list[range] = []
        start = filled = 0
        for number, needed in enumerate(tokens):
            is_full = filled + needed > max_tokens or filled >= fair_tokens or number - start >= fair_items
            if is_full and number > start:
                cut.append(range(start, number))
                start, filled = number, 0
            filled += needed
        cut.append(range(start, count))
        return cut

    def learn_answer_size(self, items: int, answer_bytes: int) -> None:
        """Learn the size of an answer; the longest recent one counts."""
        self._item_answer_bytes = max(1.0, answer_bytes / items, self._item_answer_bytes * _FORGETS)

    def tokens_of(self, inputs: EmbeddingInputs) -> list[int]:
        """Tokens of each input: known for token ids, estimated for texts."""
        if inputs.are_ids:
            return list(map(len, inputs.items))
        return self.tokens_of_texts(inputs.sizes_bytes)

    def tokens_of_texts(self, sizes_bytes: Sequence[int]) -> list[int]:
        each, per_byte = self._tokens.coefficients
        return [max(1, round(each + per_byte * size)) for size in sizes_bytes]

    def may_be_too_long(self, tokens: Sequence[int]) -> bool:
        return self.context_tokens is not None and max(tokens) > _NEAR_THE_LIMIT * self.context_tokens

    def answered_alone(self, inputs: EmbeddingInputs, tokens: int, seconds: float | None) -> None:
        """Learn from the answer to one whole request. `seconds`: None = longer than usual, and not to be learned."""
        self.answered(len(inputs.items), sum(inputs.sizes_bytes), tokens, seconds, are_ids=inputs.are_ids)

    def answered(self, items: int, size_bytes: int, tokens: int, seconds: float | None, *, are_ids: bool) -> None:
        """Learn from one answer how many tokens its inputs had, and how long they took."""
        if seconds is not None:
            self._seconds.learn(1.0, items, seconds)
        if not are_ids:
            self._tokens.learn(items, size_bytes, min(tokens, most_prompt_tokens(items, size_bytes)))


_MOST_TENANTS = 1024  # more are kept only while they wait


class _TenantShare(Share):
    """One tenant's share, which counts while several tenants wait, and its waiting pieces, oldest first."""

    __slots__ = ("pieces",)

    def __init__(self, weight: float) -> None:
        super().__init__(weight, 0.0)
        self.pieces: OrderedDict[Piece, None] = OrderedDict()


class FairQueue:
    """Owner of the waiting pieces: in order within a tenant, in fair turns between tenants.

    Turns are the scheduler's: start-time fair queueing by tokens and weight. They are counted only while several
    tenants wait, because a single tenant needs none. Pieces are in ordered dicts, because taking from the front of a
    `dict` leaves gaps: each look at its front takes longer.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[Piece, None] = OrderedDict()  # oldest first
        self._tenants: dict[str, _TenantShare] = {}
        self._clock: FairClock | None = None  # from the second tenant until the queue is empty
        self._numbers = count()
        self._most_tenants = _MOST_TENANTS
        self.items = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def oldest_seconds(self) -> float:
        """When the oldest piece joined. Only while there is one."""
        return next(iter(self._pieces)).joined_seconds

    @property
    def head(self) -> Piece:
        """The piece that `take` would begin with. Only while there is one."""
        clock = self._clock
        if clock is None:  # there is one tenant
            return next(iter(self._pieces))
        tenant: _TenantShare = next(clock.waiting.after(clock.now))[3]
        return next(iter(tenant.pieces))

    def join(self, piece: Piece) -> None:
        self._pieces[piece] = None
        self.items += piece.items
        self.tokens += piece.tokens
        tenant = self._tenants.get(piece.tenant) or self._new_tenant(piece)
        tenant.pieces[piece] = None
        if self._clock is not None and len(tenant.pieces) == 1:
            self._begin(tenant, self._clock)

    def leave(self, piece: Piece) -> bool:
        """Remove a piece; False if it has already left."""
        if piece not in self._pieces:
            return False
        del self._pieces[piece]
        self.items -= piece.items
        self.tokens -= piece.tokens
        tenant = self._tenants[piece.tenant]
        del tenant.pieces[piece]
        if not self._pieces:
            self._tenants, self._clock = {}, None
        elif not tenant.pieces and self._clock is not None:
            self._clock.waiting.leave(tenant)  # the share stays: a tenant that comes back is not ahead of others
        return True

    def take(self, max_items: float, max_tokens: int) -> list[Piece]:
        """The next batch: at least one piece, and more while they fit."""
        taken: list[Piece] = []
        items = tokens = 0
        while self._pieces:
            piece = self.head
            items, tokens = items + piece.items, tokens + piece.tokens
            if taken and (items > max_items or tokens > max_tokens or piece.alone):
                break
            if self._clock is not None:
                self._clock.serve(self._tenants[piece.tenant], piece.tokens)
            self.leave(piece)
            taken.append(piece)
            if piece.alone:
                break
        return taken

    def _new_tenant(self, piece: Piece) -> _TenantShare:
        if self._tenants and self._clock is None:
            self._clock = FairClock()
            [only] = self._tenants.values()
            self._begin(only, self._clock)
        if len(self._tenants) >= self._most_tenants:
            self._tenants = {each: tenant for each, tenant in self._tenants.items() if tenant.pieces}
            self._most_tenants = max(_MOST_TENANTS, 2 * len(self._tenants))  # else each new one would look at all
        tenant = self._tenants[piece.tenant] = _TenantShare(piece.weight)
        return tenant

    def _begin(self, tenant: _TenantShare, clock: FairClock) -> None:
        weight = next(iter(tenant.pieces)).weight
        if tenant.weight != weight:
            clock.weigh(tenant, weight)
        clock.wake(tenant)
        clock.waiting.join(tenant, next(self._numbers), tenant)


_RATE_SECONDS = 0.1  # over which arrivals are averaged
_LOOK_SECONDS = 0.001
_EARLY_SECONDS = 0.0005  # by which a timer may be early
_TRUST_GAIN = 0.5
_TRUST_REGROWS = 0.01


class BatchReason(StrEnum):
    """Why a batch was sent just then."""

    IDLE = "idle"  # nothing of its kind was in flight
    SLOT = "slot"  # fewer than wanted were in flight, and nothing was to be gained by waiting
    FULL = "full"  # its limit of items or tokens was reached, or no other piece may share it
    DELAY = "delay"  # its oldest piece had waited for the longest time allowed


class BatchKey(NamedTuple):
    """The common properties of requests that share a batch. `quarantined`: their clients recently spoiled a batch.
    `offline`: lines of offline batches, which share nothing with other requests.
    """

    model: str
    template: bytes
    are_ids: bool = False
    batch: bool = False
    bulk: bool = False
    quarantined: bool = False
    offline: bool = False


class SentBatch:
    """A batch in flight. `record`: its own, from when it is sent; never of a request that its client's task sends."""

    def __init__(self, pending: "PendingBatch", pieces: list[Piece], sent_seconds: float) -> None:
        self.pending = pending
        self.key = pending.key
        self.pieces = pieces
        self.items = sum([piece.items for piece in pieces])
        self.tokens = sum([piece.tokens for piece in pieces])  # as estimated
        self.size_bytes = sum([piece.size_bytes for piece in pieces])
        self.sent_seconds = sent_seconds
        self.clients = len(pieces)  # that still wait
        self.record: Record | None = None
        self.task: asyncio.Task[None] | None = None  # that sends it; None = a client's task does

    def run(self, sending: Coroutine[Any, Any, None], done: Callable[[asyncio.Task[None]], None]) -> None:
        """Send it in a task of its own; `done` is called at its end."""
        self.task = asyncio.get_running_loop().create_task(sending)
        self.task.add_done_callback(done)

    def begin_record(self, request: InferenceRequest) -> Record:
        """The record of its request, which is sent now."""
        self.record = Record(request.request_id, request.endpoint, self.sent_seconds)
        return self.record

    def client_left(self) -> None:
        """A client stopped waiting; the batch's task is cancelled after the last one."""
        self.clients -= 1
        if not self.clients and self.task is not None:
            self.task.cancel()


class BatchKind(Protocol):
    """The content of batches: inputs or documents. `work` is its name in errors."""

    work: str

    def observe(self, batch: SentBatch, reason: BatchReason) -> None:
        """Count a batch that is sent."""

    async def answer(self, batch: SentBatch) -> BufferedResponse | None:
        """Send a batch and deliver its answer. Returns the backend's response if it rejected the content."""


@dataclass
class BulkSlots:
    """The slots of one model that long lists have taken."""

    items: int = 0
    _last: "PendingBatch | None" = None

    def left(self, pending: "PendingBatch", waiting: "Iterable[PendingBatch]") -> float:
        """Slots that a batch may take now; any number if none is taken. The last taker leaves some to the others."""
        if not self.items:
            return math.inf
        others = 0
        if self._last is pending:
            others = max((each.next_items for each in waiting if each is not pending), default=0)
        return pending.sizes.bulk_share - self.items - others

    def take(self, pending: "PendingBatch", items: int) -> None:
        self.items += items
        self._last = pending

    def give_back(self, items: int) -> None:
        self.items -= items


@dataclass(eq=False, repr=False)
class PendingBatch:
    """Pieces that may share a batch and wait for the next one. `look` is called to send batches that are due."""

    key: BatchKey
    _: KW_ONLY
    kind: BatchKind
    sizes: ModelSizes
    config: EmbeddingsConfig
    look: "Callable[[PendingBatch], None]"
    in_flight: int = 0
    queue: FairQueue = field(default_factory=FairQueue)
    _soon: asyncio.Handle | None = None
    _timer: asyncio.TimerHandle | None = None
    _rate_sum: float = 0.0
    _at: float = -math.inf
    _held: tuple[float, int] | None = None  # since when a free slot is held, with how many items then
    _trust: float = 1.0  # the share of the expected savings that holding a slot achieved

    def apply(self, config: EmbeddingsConfig) -> None:
        """Take over other limits of a batch, and check whether a batch is due under them."""
        self.config = config
        self.look_soon()

    @property
    def is_idle(self) -> bool:
        """Nothing waits or is in flight, and no look is planned."""
        return not self.queue and not self.in_flight and self._soon is None

    @property
    def next_items(self) -> int:
        """Items of the piece that the next batch begins with; 0 = none waits."""
        return self.queue.head.items if self.queue else 0

    @property
    def has_next_calls(self) -> bool:
        """Whether each engine has a call of offline lines, and the next one waits for idle capacity."""
        return self.in_flight >= _LINE_CALLS * self.sizes.replicas

    @property
    def _bounds(self) -> tuple[int, int]:
        items, tokens = self.sizes.bounds(self.config, offline=self.key.offline)
        return min(items, self.sizes.limit), tokens

    def join(self, piece: Piece) -> None:
        now = piece.joined_seconds
        self._rate_sum = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) + piece.items
        self._at = now
        self.queue.join(piece)

    def look_soon(self) -> None:
        """Look at the end of this turn of the loop, once for all requests of the turn."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self.look, self)

    def look_later(self, now: float) -> None:
        """Look again when `due` may change without an event."""
        if self.queue:
            delay = self.config.max_delay_seconds
            left = self.queue.oldest_seconds + delay - now
            seconds = left if left > _EARLY_SECONDS else max(_LOOK_SECONDS, delay)
            self._timer = asyncio.get_running_loop().call_later(seconds, self.look_soon)

    def looked(self) -> None:
        """Cancel the next look: this is one."""
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def due(self, now: float, *, crowded: bool) -> BatchReason | None:
        """The reason to send a batch now; None = keep waiting. `crowded`: it would also wait on the backends."""
        queue, config = self.queue, self.config
        if not queue:
            self._held = None
            return None
        max_items, max_tokens = self._bounds
        if queue.items >= max_items or queue.tokens >= max_tokens or queue.head.alone:
            return BatchReason.FULL
        if not self.in_flight:
            return BatchReason.IDLE
        if crowded:
            return None
        if now - queue.oldest_seconds >= config.max_delay_seconds - _EARLY_SECONDS:
            return BatchReason.DELAY
        if self.in_flight >= self.sizes.slots or self._is_worth_holding(now):
            return None
        return BatchReason.SLOT

    def take(self, now: float, max_items: float = math.inf) -> SentBatch:
        """The batch that is due; it is in flight until `ended`."""
        self._judge_hold(now)
        self.in_flight += 1
        most_items, max_tokens = self._bounds
        return SentBatch(self, self.queue.take(min(max_items, most_items), max_tokens), now)

    def ended(self) -> None:
        self.in_flight -= 1

    def _is_worth_holding(self, now: float) -> bool:
        """Whether requests expected meanwhile save more overhead than the delay costs the waiting ones."""
        rate = self._rate_sum * math.exp((self._at - now) / _RATE_SECONDS) / _RATE_SECONDS
        expected, items = rate * self.sizes.overhead_seconds, self.queue.items
        if expected * self._trust > items:
            if self._held is None:
                self._held = (now, items)
            return True
        if expected > items:
            self._trust = min(1.0, self._trust + _TRUST_REGROWS)
        return False

    def _judge_hold(self, now: float) -> None:
        """Learn the savings of a hold: clients that resend when answered arrive often, but never meanwhile."""
        if self._held is None:
            return
        (since, items), self._held = self._held, None
        imposed, saved = items * (now - since), (self.queue.items - items) * self.sizes.overhead_seconds
        if imposed > 0:
            self._trust += _TRUST_GAIN * (min(1.0, max(0.0, saved / imposed)) - self._trust)
