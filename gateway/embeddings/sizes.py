"""Estimates for a model: its backends, tokens of texts, seconds of batches.

Seconds are fitted by a line through recent measurements, y = a * u + b * v, by least squares that forget.
"""

from collections.abc import Iterable, Sequence

from gateway.backends.backend import Backend
from gateway.request import EmbeddingInputs, most_prompt_tokens
from gateway.routing.engine import Engine

_MEMORY = 64.0  # measurements


class LinearFit:
    """Fits two coefficients, neither below zero, to pairs of amounts and their totals.

    Starts from a guess that counts as one measurement at each of two points, so that it is never without an answer.
    """

    __slots__ = ("_uu", "_uv", "_uy", "_vv", "_vy", "coefficients")

    def __init__(self, a: float, b: float, u: float = 1.0, v: float = 1.0) -> None:
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
        self._tokens = LinearFit(2.0, 0.25, 4.0, 400.0)  # of texts: for each, and for each byte
        self._seconds = LinearFit(0.003, 0.0003, 1.0, 8.0)  # of a batch: for itself, and for each item

    def learn_engines(self, model: str, engines: Sequence[Engine], backends: Iterable[Backend]) -> None:
        """`engines`: those that serve it now; at least one."""
        self.knows_engines = True
        self.replicas, self.cap = len(engines), min(engine.cap for engine in engines)
        # A quarter of the slots is reserved for short requests. They count by the limits of now, not by the caps: a
        # piece that waits behind others of its list must wait here, because `max_wait_seconds` does not count here.
        limits = [engine.slots for engine in engines]
        self.limit, self.bulk_share = min(limits), sum(limits) - sum(limits) // 4
        self.slots = _SLOTS_A_REPLICA * self.replicas
        self.context_tokens = min(filter(None, (each.context_tokens.get(model) for each in backends)), default=None)

    @property
    def overhead_seconds(self) -> float:
        return self._seconds.coefficients[0]

    def most_items(self, max_items: int) -> int:
        """Inputs of a batch whose answer is parsed at once, and at most so many."""
        return min(max_items, max(1, int(_ANSWER_BYTES / self._item_answer_bytes)))

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
