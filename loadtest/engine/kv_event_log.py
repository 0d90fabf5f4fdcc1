"""Writes down as KV events what happens to one engine's prefix cache, until a step's end takes them."""

from collections.abc import Callable, Sequence
from hashlib import sha256

from loadtest.engine.kv_events import (
    GROUP,
    MEDIUM,
    SPEC_KIND,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    HashFormat,
)
from loadtest.engine.sequence import SequenceState


def long_hash(key: int) -> bytes:
    """A hash of 32 bytes whose low 64 bits are the key."""
    low = key.to_bytes(8, "big")
    return sha256(low).digest()[:24] + low


class KvEventLog:
    """Observes a scheduler and its block pool."""

    def __init__(self, block_size: int, hashes: HashFormat) -> None:
        self._block_size = block_size
        self._hash: Callable[[int], BlockHash] = long_hash if hashes is HashFormat.BYTES else int
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def on_stored(self, sequence: SequenceState, first_block: int, parent_key: int | None, keys: Sequence[int]) -> None:
        """Blocks of a sequence can be found from now on."""
        content, size, told = sequence.content, self._block_size, self._hash
        assert content is not None, "a sequence whose blocks are told of says what they hold"
        self._events.append(
            BlockStored(
                block_hashes=[told(key) for key in keys],
                parent_block_hash=None if parent_key is None else told(parent_key),
                token_ids=content.token_ids(first_block * size, (first_block + len(keys)) * size),
                block_size=size,
                lora_id=content.lora_id,
                medium=MEDIUM,
                lora_name=content.lora_name,
                extra_keys=content.extra_keys(first_block, len(keys)),
                group_idx=GROUP,
                kv_cache_spec_kind=SPEC_KIND,
                session_id=content.session_id,
            )
        )

    def on_removed(self, key: int) -> None:
        """One block with that key was overwritten."""
        self._events.append(BlockRemoved([self._hash(key)], MEDIUM, GROUP))

    def on_cleared(self) -> None:
        self._events.append(AllBlocksCleared())
