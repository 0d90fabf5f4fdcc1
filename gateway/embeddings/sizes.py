"""What is known of a model's embeddings: sizes of its backends, tokens of its texts, time that its batches take."""

from collections.abc import Iterable, Sequence

from gateway.backends.backend import Backend, EngineRank
from gateway.embeddings.bulk import BulkTaker
from gateway.embeddings.fit import LinearFit
from gateway.request import EmbeddingInputs, most_prompt_tokens

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

    def learn_engines(
        self, model: str, engines: Sequence[Backend | EngineRank], backends: Iterable[Backend], now: float
    ) -> None:
        """The engines that serve it now; at least one."""
        caps = [engine.cap for engine in engines]
        self.replicas, self.cap, self.total_cap = len(caps), min(caps), sum(caps)
        limits = [engine.limit(now) for engine in engines]
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
