"""What the coalescer and the rerank splitter share: the parts below them, lists into pieces, answer headers."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.backends.fleet import Fleet
from gateway.config import EmbeddingsConfig
from gateway.embeddings.fair_queue import Owner, Piece
from gateway.embeddings.sizes import BulkSlots, ModelSizes
from gateway.embeddings.waiter import Waitlist
from gateway.embeddings.wire import pieces
from gateway.observe.metrics import EmbeddingMetrics
from gateway.observe.record import Record
from gateway.request import Demand, InferenceRequest, Sink, UpstreamResult
from gateway.resources import MemoryBudget
from gateway.routing.engine import Engine

Dispatch = Callable[[InferenceRequest, Sink, Record], Awaitable[UpstreamResult]]  # as `Dispatcher.dispatch`


@dataclass(frozen=True, slots=True)
class PoolServices:
    """The parts that both use. Both wait in one `waitlist`, and take `bulk` slots of a model together."""

    fleet: Fleet
    dispatch: Dispatch
    config: EmbeddingsConfig
    waitlist: Waitlist
    metrics: EmbeddingMetrics
    clock: Callable[[], float]
    memory: MemoryBudget
    response_headers: bool
    bulk: dict[str, BulkSlots] = field(default_factory=lambda: defaultdict(BulkSlots))

    def new_sizes(self, model: str, next_items: Callable[[], int], look: Callable[[], None]) -> ModelSizes:
        """Sizes of a model that is served, for one kind of lists: see `BulkSlots.add`."""
        return ModelSizes(self.bulk[model].add(next_items, look))

    def update(self, model: str, sizes: ModelSizes, engines: Sequence[Engine] | None) -> None:
        """Follow the engines that serve the model now, if any."""
        if engines:
            sizes.learn_engines(model, engines, self.fleet.serving(model) or ())

    def cut(self, tokens: Sequence[int], sizes: ModelSizes, max_items: int) -> list[range]:
        """The pieces of a list, each within the limits of a batch; one, if the whole list is."""
        ranges = pieces(tokens, min(max_items, sizes.cap), self.config.max_batch_tokens)
        if len(ranges) == 1:
            return ranges
        return pieces(tokens, sizes.piece_items(max_items), self.config.max_batch_tokens, sizes.replicas)

    def pieces_of(
        self, demand: Demand, ranges: list[range], tokens: Sequence[int], sizes_bytes: Sequence[int], owner: Owner
    ) -> list[Piece[Owner]]:
        """These parts of a list, which begin to wait now. Several share no batch."""
        now, alone = self.clock(), len(ranges) > 1
        made = []
        for each in ranges:
            part = slice(each.start, each.stop)
            size_bytes = sum(sizes_bytes[part])
            made.append(
                Piece(
                    owner,
                    each.start,
                    len(each),
                    sum(tokens[part]),
                    size_bytes,
                    now,
                    demand.tenant,
                    demand.weight,
                    alone,
                )
            )
        return made

    def headers(self, backends: Iterable[str], queue_seconds: float, others: str) -> bytes:
        """Header lines of an answer made from batches or pieces."""
        if not self.response_headers:
            return b""
        names = ",".join(backends)
        backend = f"x-gateway-backend: {names}\r\n" if names else ""
        queued = f"x-gateway-queue-ms: {queue_seconds * 1000:.0f}\r\n"
        return f"{backend}{queued}x-gateway-prefix-tokens: 0\r\n{others}".encode()
