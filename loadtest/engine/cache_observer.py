"""Who hears what enters and leaves the prefix cache."""

from collections.abc import Sequence
from typing import Protocol

from loadtest.engine.sequence import SequenceState


class CacheObserver(Protocol):
    """Told of every change, in order."""

    def on_stored(self, sequence: SequenceState, first_block: int, parent_key: int | None, keys: Sequence[int]) -> None:
        """Full blocks of a sequence, from its block number `first_block` on, can be found by `keys` from now on."""

    def on_removed(self, key: int) -> None:
        """One block with that key was overwritten; another may hold the same."""

    def on_cleared(self) -> None: ...
