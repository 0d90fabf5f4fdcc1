"""Receives engines' cache contents in tests."""

import asyncio
from collections.abc import Callable, Sequence

from gateway.features.exact.endpoints import Source
from gateway.features.exact.feed import KvEvents
from gateway.features.exact.index import ExactIndex, packed, token_keys, token_seed
from tests.unit.exact.publisher import Publisher

DEADLINE_SECONDS = 10.0


class Listener:
    """Keeps an index, and wakes whoever waits for something to become true of it."""

    def __init__(self) -> None:
        self.index = ExactIndex()
        self.states: dict[int, tuple[bool, bool]] = {}
        self.resident_tokens: dict[int, int] = {}
        self.clears: list[int] = []
        self.calls: list[str] = []
        self.largest_update = 0
        self.removed_while_whole = 0
        self._news = asyncio.Event()

    def changed(self, engine: int, added: Sequence[int], removed: Sequence[int], resident_tokens: int) -> None:
        self.index.update(engine, added, removed)
        self.resident_tokens[engine] = resident_tokens
        self.largest_update = max(self.largest_update, len(added) + len(removed))
        self.removed_while_whole += len(removed) if self.states.get(engine) == (True, True) else 0
        self.calls.append("changed")
        self._news.set()

    def cleared(self, engine: int) -> None:
        self.clears.append(engine)
        self.calls.append("cleared")
        self._news.set()

    def state(self, engine: int, live: bool, whole: bool) -> None:
        self.index.set_live(engine, live)
        self.states[engine] = (live, whole)
        self.calls.append(f"state {live} {whole}")
        self._news.set()

    def depth(self, tokens: Sequence[int], block_tokens: int = 4, engine: int = 0) -> int:
        """Leading blocks of a prompt that the engine is known to hold."""
        depths = self.index.depths(token_keys(packed(tokens), block_tokens, token_seed()))
        return depths[engine] if engine < len(depths) else 0

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def joined(self, publisher: Publisher, engine: int = 0, whole: bool = True) -> None:
        """Wait until both sides know of each other."""
        await self.until_live(engine, whole)
        await asyncio.to_thread(publisher.wait_for_subscriber)

    async def until_live(self, engine: int = 0, whole: bool = True) -> None:
        """Wait until the engine's events are followed."""
        await self.until(lambda: self.states.get(engine) == (True, whole))


def source_of(publisher: Publisher, rank: int = 0, topic: str | None = "kv@test") -> Source:
    """Where a publisher is heard."""
    return Source(rank, publisher.endpoint, publisher.replay_endpoint, topic=topic)


def status(events: KvEvents, engine: int = 0) -> dict[str, object]:
    """A engine's status."""
    [found] = [entry for entry in events.status() if entry["engine"] == engine]
    return found
