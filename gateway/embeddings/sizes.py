"""What is known of a model's embeddings: backends, tokens of its texts, seconds of its batches, slots for long lists.

Seconds are fitted by a line through recent measurements, y = a * u + b * v, by least squares that forget.
"""

from collections.abc import Callable, Iterable, Sequence

from gateway.backends.backend import Backend
from gateway.request import EmbeddingInputs, most_prompt_tokens
from gateway.routing.engine import Engine

_MEMORY = 64.0  # measurements


class LinearFit:
    """Learns two coefficients, neither below zero, from pairs of amounts and what they came to together.

    Starts from a guess that counts as one measurement at each of two points, so that it is never without an answer.
    """

    __slots__ = ("_uu", "_uv", "_uy", "_vv", "_vy")

    def __init__(self, a: float, b: float, u: float = 1.0, v: float = 1.0) -> None:
        self._uu, self._uv, self._vv = u * u, 0.0, v * v
        self._uy, self._vy = a * u * u, b * v * v

    def learn(self, u: float, v: float, y: float) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self._uu = self._uu * keep + u * u
        self._uv = self._uv * keep + u * v
        self._vv = self._vv * keep + v * v
        self._uy = self._uy * keep + u * y
        self._vy = self._vy * keep + v * y

    @property
    def coefficients(self) -> tuple[float, float]:
        determinant = self._uu * self._vv - self._uv * self._uv
        if determinant > 1e-9 * self._uu * self._vv:
            a = (self._uy * self._vv - self._vy * self._uv) / determinant
            b = (self._vy * self._uu - self._uy * self._uv) / determinant
            if a >= 0 and b >= 0:
                return a, b
            return (0.0, self._vy / self._vv) if a < b else (self._uy / self._uu, 0.0)
        total = self._uu + self._vv  # everything lies on one line through the origin: both share what it came to
        shared = (self._uy + self._vy) / (total + 2 * self._uv)
        return shared, shared

    def at(self, u: float, v: float) -> float:
        a, b = self.coefficients
        return a * u + b * v


class BulkSlots:
    """One model's slots that long lists have taken."""

    def __init__(self) -> None:
        self.taken_items = 0
        self._takers: list[BulkTaker] = []
        self._last: BulkTaker | None = None

    def __repr__(self) -> str:
        return f"<BulkSlots {self.taken_items} taken by {len(self._takers)} kinds>"

    def joined(self, next_items: Callable[[], int], look: Callable[[], None]) -> "BulkTaker":
        """One more kind of lists. `next_items`: slots for which it waits; `look` is called when slots come free."""
        taker = BulkTaker(self, next_items, look)
        self._takers.append(taker)
        return taker

    def taken(self, by: "BulkTaker", items: int) -> None:
        self.taken_items += items
        self._last = by

    def given_back(self, by: "BulkTaker", items: int) -> None:
        """Slots come free: the others look first."""
        self.taken_items -= items
        for taker in self._takers:
            if taker is not by:
                taker.look()
        by.look()

    def kept_from(self, taker: "BulkTaker") -> int:
        """Slots that are left to others that wait, because it is their turn."""
        return sum(other.next_items() for other in self._takers if other is not taker) if self._last is taker else 0


class BulkTaker:
    """What one kind of lists takes of them."""

    def __init__(self, slots: BulkSlots, next_items: Callable[[], int], look: Callable[[], None]) -> None:
        self.items = 0
        self.next_items = next_items
        self.look = look
        self._slots = slots

    def __repr__(self) -> str:
        return f"<BulkTaker {self.items} of {self._slots!r}>"

    def left(self, share_items: int) -> int | None:
        """How much of such a share may be taken now; None = any amount, because nothing is taken."""
        slots = self._slots
        return share_items - slots.taken_items - slots.kept_from(self) if slots.taken_items else None

    def may_take(self, items: int, share_items: int) -> bool:
        """Whether so many may be taken now."""
        left = self.left(share_items)
        return left is None or items <= left

    def take(self, items: int) -> None:
        self.items += items
        self._slots.taken(self, items)

    def give_back(self, items: int) -> None:
        self.items -= items
        self._slots.given_back(self, items)


class BulkShares:
    """Owner of the slots that long lists have taken of each model."""

    def __init__(self) -> None:
        self._models: dict[str, BulkSlots] = {}

    def of(self, model: str) -> BulkSlots:
        """Those of a model that is served."""
        return self._models.setdefault(model, BulkSlots())


_SLOTS_A_REPLICA = 4  # batches: some that the engine works on, and some that its API server reads or writes
_NEAR_THE_LIMIT = 0.8  # of the context: an estimate above this may be a text that is refused
_FEWEST_ITEMS = 8
_ANSWER_BYTES = 8388608  # of a batch: a longer one takes too long to parse
_ITEM_ANSWER_BYTES = 86016  # until an answer has told: 4,096 numbers, as text
_FORGETS = 0.9


class ModelSizes:
    """One model. Guesses until answers have taught better."""

    def __init__(self, bulk: BulkTaker) -> None:
        self.bulk = bulk  # slots that long lists have taken
        self.replicas = 1
        self.cap = 1  # of the replica with the fewest slots
        self.limit = 1  # the same for now, while backends start slowly or are overloaded
        self.total_cap = 1
        self.total_limit = 1
        self.context_tokens: int | None = None
        self._item_answer_bytes = float(_ITEM_ANSWER_BYTES)
        self._tokens = LinearFit(2.0, 0.25, 4.0, 400.0)  # of texts: for each, and for each byte
        self._seconds = LinearFit(0.003, 0.0003, 1.0, 8.0)  # of a batch: for itself, and for each item

    def learn_engines(self, model: str, engines: Sequence[Engine], backends: Iterable[Backend]) -> None:
        """The engines that serve it now; at least one."""
        caps = [engine.cap for engine in engines]
        self.replicas, self.cap, self.total_cap = len(caps), min(caps), sum(caps)
        limits = [engine.slots for engine in engines]
        self.limit, self.total_limit = min(limits), sum(limits)
        lengths = [card.max_model_len for each in backends for card in each.facts.models if card.id == model]
        self.context_tokens = min((length for length in lengths if length), default=None)

    @property
    def slots(self) -> int:
        """Batches that keep its backends busy."""
        return _SLOTS_A_REPLICA * self.replicas

    @property
    def overhead_seconds(self) -> float:
        """What a batch takes whatever its size."""
        return self._seconds.coefficients[0]

    @property
    def bulk_share(self) -> int:
        """Items of long lists that may be in flight: a quarter of the slots is kept for short ones."""
        return self.total_cap - self.total_cap // 4

    def most_items(self, max_items: int) -> int:
        """Inputs of a batch whose answer is parsed at once, and at most so many."""
        return min(max_items, max(1, int(_ANSWER_BYTES / self._item_answer_bytes)))

    def piece_items(self, max_items: int) -> int:
        """Inputs of one piece of a list that has to be cut: several pieces fit on a backend, so that it never idles."""
        return min(max_items, self.limit, max(_FEWEST_ITEMS, self.cap // 4))

    def answer_came(self, items: int, answer_bytes: int) -> None:
        """The answer to so many inputs had so many bytes. The longest of late counts."""
        self._item_answer_bytes = max(1.0, answer_bytes / items, self._item_answer_bytes * _FORGETS)

    def tokens_of(self, inputs: EmbeddingInputs) -> list[int]:
        """Tokens of each input: known for token ids, estimated for texts."""
        if inputs.are_ids:
            return list(map(len, inputs.items))
        return self.tokens_of_texts(inputs.sizes_bytes)

    def tokens_of_texts(self, sizes_bytes: Sequence[int]) -> list[int]:
        """Tokens of texts of these sizes, estimated."""
        each, per_byte = self._tokens.coefficients
        return [max(1, round(each + per_byte * size)) for size in sizes_bytes]

    def may_be_too_long(self, tokens: Sequence[int]) -> bool:
        """Whether an input may be over the model's context."""
        return self.context_tokens is not None and max(tokens) > _NEAR_THE_LIMIT * self.context_tokens

    def learn_tokens(self, inputs: EmbeddingInputs, tokens: int) -> None:
        """So many tokens were in these inputs."""
        if not inputs.are_ids:
            self._learn_tokens(len(inputs.items), sum(inputs.sizes_bytes), tokens)

    def answered(self, items: int, size_bytes: int, tokens: int, seconds: float, *, are_ids: bool) -> None:
        """So many inputs took so many tokens and so long."""
        self._seconds.learn(1.0, items, seconds)
        if not are_ids:
            self._learn_tokens(items, size_bytes, tokens)

    def _learn_tokens(self, items: int, size_bytes: int, tokens: int) -> None:
        self._tokens.learn(items, size_bytes, min(tokens, most_prompt_tokens(items, size_bytes)))
