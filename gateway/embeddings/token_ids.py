"""Batches of texts that are sent as token ids, so that it is known how many tokens are whose."""

import orjson

from gateway.embeddings.group import Flight
from gateway.embeddings.part import Part
from gateway.observe.embeddings import EmbeddingMetrics
from gateway.tokenization.tokenization import Encoded, NotEncoded, Tokenization

# Fields that do the same to a text and to its ids, with `add_special_tokens` heeded here. Truncation does not: that of
# a text spares its special tokens.
_KNOWN = frozenset((
    "model", "encoding_format", "dimensions", "use_activation", "priority", "cache_salt", "add_special_tokens", "input",
))  # fmt: skip


class TokenIds:
    """Tells the ids of batches that are shared. Who is alone is told its usage by the backend."""

    def __init__(self, tokenization: Tokenization, metrics: EmbeddingMetrics) -> None:
        self._tokenization = tokenization
        self._metrics = metrics

    async def of(self, flight: Flight) -> Encoded | None:
        """The ids of a batch, in bounded time; None = it is to be sent as texts."""
        key = flight.group.key
        if len(flight.parts) < 2 or key.are_ids or not self._tokenization.configured(key.model):
            return None
        encoded = await self._encoded(flight)
        told = encoded if isinstance(encoded, str) else "sent"
        self._metrics.as_ids.add((key.model, told))
        return None if isinstance(encoded, str) else encoded

    def stand_for_texts(self, model: str, backend: str) -> bool:
        """Whether this backend may be sent ids. One that comes while a batch waits for its place may be another."""
        return self._tokenization.embeds_alike(model, backend)

    async def _encoded(self, flight: Flight) -> Encoded | str:
        key = flight.group.key
        fields = orjson.loads(key.template + b"0}")
        if not fields.keys() <= _KNOWN:
            return "fields"
        texts = [item for part in flight.parts for item in part.owner.inputs.items]
        size_bytes, special = sum(part.size_bytes for part in flight.parts), fields.get("add_special_tokens", True)
        encoded = await self._tokenization.encode(key.model, texts, size_bytes, special=special)
        if isinstance(encoded, NotEncoded):
            return encoded.value
        return encoded if all(encoded.counts) else "empty"


def counts_by_part(parts: list[Part], counts: list[int]) -> list[int]:
    """The tokens of each part, from those of each input."""
    remaining = iter(counts)
    return [sum(next(remaining) for _ in range(part.items)) for part in parts]
