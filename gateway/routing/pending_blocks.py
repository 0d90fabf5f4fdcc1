"""Blocks on their way: sent to an engine whose events have not told of them yet.

Events follow what an engine does by tens of milliseconds, and what waits in an engine is not told at all. Requests that
begin alike often come closer together than that.
"""

from collections.abc import Iterable, Sequence

LIFE_SECONDS = 5.0  # what was not told after this to twice this never will be: the request failed


class PendingBlocks:
    """Keys of `routing.token_blocks`, by engine, until events tell of them."""

    def __init__(self) -> None:
        self._young: dict[int, int] = {}  # key -> bit mask of engines
        self._old: dict[int, int] = {}
        self._since_seconds = 0.0

    def __bool__(self) -> bool:
        return bool(self._young or self._old)

    def expect(self, engine: int, keys: Iterable[int]) -> None:
        """A prompt with these blocks was sent there."""
        young, bit = self._young, 1 << engine
        for key in keys:
            young[key] = young.get(key, 0) | bit

    def told(self, engine: int, keys: Iterable[int]) -> None:
        """The engine's events speak for these blocks from now on."""
        if not self:
            return
        others = ~(1 << engine)
        for key in keys:
            for generation in (self._young, self._old):
                if key not in generation:
                    continue
                if left := generation[key] & others:
                    generation[key] = left
                else:
                    del generation[key]

    def forget(self, engine: int) -> None:
        """Nothing is on its way there."""
        self.told(engine, [*self._young, *self._old])

    def age(self, now: float) -> None:
        """Time has passed; to be told now and then."""
        if now - self._since_seconds >= LIFE_SECONDS:
            self._since_seconds = now
            self._young, self._old = {}, self._young

    def run(self, engine: int, keys: Sequence[int], start: int) -> int:
        """How many of these blocks, from `start` on, follow each other on their way to the engine."""
        young, old, end = self._young, self._old, start
        while end < len(keys) and (young.get(keys[end], 0) | old.get(keys[end], 0)) >> engine & 1:
            end += 1
        return end - start
