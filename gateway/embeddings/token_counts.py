"""How many tokens of a shared batch are whose: told by the model's tokenizer while the backend works on the batch."""

import asyncio
from types import TracebackType
from typing import Any, Self

import orjson

from gateway.embeddings.group import Flight
from gateway.embeddings.part import Part
from gateway.observe.embeddings import EmbeddingMetrics
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
