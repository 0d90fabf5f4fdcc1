"""A tokenizer for scenes: a token for each word, and one before and one after them. Tests tell it what to do."""

import asyncio
from itertools import count

import orjson

from gateway.tokenization.tokenization import Encoded, NotEncoded

FIRST, LAST = 1, 2


class Words:
    """Stands for a `Tokenization`. Not configured unless a test says so."""

    def __init__(self) -> None:
        self.is_configured = False
        self.trouble: NotEncoded | None = None
        self.seconds = 0.001
        self.unverified: set[str] = set()
        self.asked: list[tuple[list[str], bool]] = []
        self.cancelled = 0
        self._ids: dict[str, int] = {}
        self._numbers = count(3)
        self._texts: dict[tuple[int, ...], str] = {}

    def configured(self, model: str) -> bool:
        """Whether batches are to be sent as ids."""
        return self.is_configured

    def embeds_alike(self, model: str, backend: str) -> bool:
        """Whether this backend has the same tokens."""
        return backend not in self.unverified

    async def encode(self, model: str, texts: list[str], size_bytes: int, *, special: bool) -> Encoded | NotEncoded:
        """The ids of texts, after a while."""
        self.asked.append((texts, special))
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.trouble is not None:
            return self.trouble
        ids = [self._ids_of(text, special) for text in texts]
        return Encoded(list(map(orjson.dumps, ids)), list(map(len, ids)))

    def _ids_of(self, text: str, special: bool) -> list[int]:
        for word in text.split():
            self._ids.setdefault(word, next(self._numbers))
        bare = [self._ids[word] for word in text.split()]
        ids = [FIRST, *bare, LAST] if special else bare
        self._texts[tuple(ids)] = text
        return ids

    def text_of(self, item: str | list[int]) -> str | list[int]:
        """The text that these ids were told of; anything else as it is."""
        return self._texts.get(tuple(item), item) if isinstance(item, list) else item
