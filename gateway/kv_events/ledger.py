"""What one engine holds according to its events, by the gateway's keys. Pure.

An engine names its blocks by hashes that only it can compute. Here each is matched with a key of
`routing.exact_index`, chained from the parent's key, so that a prompt that was tokenized here finds it. A block whose
parent is not known (its event was never received) is kept as an orphan: it counts, but has no key.

Only blocks in GPU memory count; a connector's copies elsewhere do not. Of a model with several groups of layers, the
first group with full attention stands for all: the others keep a window or a state, which proves no prefix.

vLLM keeps several copies of a block that it computed twice, and reports each copy stored and each one removed: the
block is gone with its last copy. It also reports reused blocks again if a request asks for it
(`kv_cache_report_mode`): a prompt of several blocks that are all held is such a report, because for a prompt that it
holds the engine computes at most the last block. A count that grows beyond the cache cannot be right, so from then on
one removal ends a block.

Blocks are spread over many small dicts: growing a large one would hold the interpreter for milliseconds.
"""

from collections.abc import Iterable
from typing import Any

from xxhash import xxh3_64_intdigest

from gateway.kv_events.wire import BlockHash, Event, Removed, Stored
from gateway.routing.exact_index import TOKEN_BYTES, packed, token_keys, token_seed

FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # None: not reported
GPU = frozenset({None, "GPU"})
SHARDS = 64  # a power of two
MAX_BLOCKS = (512 << 20) // 256  # memory for one engine; a block takes 256 bytes, in the routing index too; measured
MAX_COPIED_BLOCKS = 1 << 18  # with more of them, copies are counted no longer


class Ledger:
    """One engine's blocks. Changes are collected until they are taken."""

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_tokens = 0  # 0 = not known yet
        self.resident_blocks = 0
        self.orphans = 0
        self.ignored_events = 0
        self.overflows = 0  # times that all was dropped, because no cache can hold so much
        self._group: int | None = None
        self._counts_copies = True
        self._copies = 0  # of all blocks
        self._keys: list[dict[BlockHash, int | None]] = [{} for _ in range(SHARDS)]  # None = an orphan
        self._more_copies: dict[BlockHash, int] = {}  # only of blocks with more than one
        self._hashes: list[dict[int, int]] = [{} for _ in range(SHARDS)]  # key -> how many hashes have it
        self._cleared = False
        self._blocks_taken = 0
        self._changes: dict[int, bool] = {}  # key -> whether it is held now
        self._dropped: list[dict[int, int]] = []  # whose keys went before the changes

    @property
    def resident_tokens(self) -> int:
        """Prompt tokens that the blocks are good for; further copies of a block are not counted."""
        return self.resident_blocks * self.block_tokens

    @property
    def fullness(self) -> float:
        """Share of the engine's cache that is taken by blocks with keys; 0 if its size is not known."""
        if self.capacity_tokens is None or not self.block_tokens:
            return 0.0
        return (self._copies - self.orphans) * self.block_tokens / max(1, self.capacity_tokens)

    @property
    def pending(self) -> int:
        """Number of changes not taken yet; a change in the number of blocks without keys counts too."""
        return len(self._changes) + len(self._dropped) + self._cleared + (self.resident_blocks != self._blocks_taken)

    def apply(self, event: Event) -> None:
        if isinstance(event, Stored):
            self.ignored_events += not self._stored(event)
        elif isinstance(event, Removed):
            self._removed(event)
        else:
            self.clear()

    def clear(self) -> None:
        self.drop()
        self._cleared = True

    def drop(self) -> None:
        """Forget all blocks, although the engine may still hold them."""
        self._changes = {key: False for key, held in self._changes.items() if not held}
        self._dropped += [hashes for hashes in self._hashes if hashes]
        self._hashes = [{} for _ in range(SHARDS)]
        for keys in self._keys:
            keys.clear()
        self._more_copies.clear()
        self.resident_blocks = self._copies = self.orphans = 0

    def forget(self) -> None:
        """Forget all blocks and the block size."""
        self.drop()
        self.block_tokens, self._group, self._counts_copies = 0, None, True

    def take(self) -> tuple[bool, list[int], list[int]]:
        """Changes since the last time: whether the cache is empty, or another process's; added keys; removed keys.

        A key that came and went is removed. After `drop` there are only removed ones.
        """
        changes, self._changes = self._changes, {}
        dropped, self._dropped = self._dropped, []
        cleared, self._cleared = self._cleared, False
        self._blocks_taken = self.resident_blocks
        added = [key for key, held in changes.items() if held]
        removed = [key for hashes in dropped for key in hashes if key not in changes]
        removed += [key for key, held in changes.items() if not held]
        return cleared, added, removed

    def _stored(self, event: Stored) -> bool:
        """False = the event is ignored: it proves no prefix."""
        hashes, size, parent, shards = event.block_hashes, event.block_size, event.parent_block_hash, self._keys
        if event.medium not in GPU or event.kv_cache_spec_kind not in FULL_ATTENTION:
            return False
        if self._group is None:
            self._group = event.group_idx
        if event.group_idx != self._group or not size or len(event.token_ids) != len(hashes) * size:
            return False  # a window's or a state's blocks come with gaps
        if size < self.block_tokens:
            return False  # a part of a block: the largest blocks are the engine's
        if size > self.block_tokens > 0:
            self.clear()
        self.block_tokens = size
        if parent is None:
            chain: int | None = token_seed(event.lora_name, _salt(event))
        else:
            chain = shards[hash(parent) & SHARDS - 1].get(parent)
        try:
            keys = [None] * len(hashes) if chain is None else _chained(event, chain)
        except OverflowError:
            return False  # what is no token id
        are_held = (block in shards[hash(block) & SHARDS - 1] for block in hashes)
        is_report = parent is None and len(hashes) > 1 and all(are_held)
        for block, key in zip(hashes, keys, strict=True):
            self._add(block, key, not is_report)
        if self._copies > self._capacity_blocks() or len(self._more_copies) > MAX_COPIED_BLOCKS:
            self._overflowed()
        return True

    def _add(self, block: BlockHash, key: int | None, is_copy: bool) -> None:
        keys = self._keys[hash(block) & SHARDS - 1]
        if block not in keys:
            keys[block] = key
            self.resident_blocks += 1
            self._copies += 1
        else:
            if is_copy and self._counts_copies:
                self._more_copies[block] = self._more_copies.get(block, 0) + 1
                self._copies += 1
            if key is None or keys[block] is not None:
                return
            keys[block] = key  # an orphan's prefix became known
            self.orphans -= 1
        if key is None:
            self.orphans += 1
            return
        hashes = self._hashes[key & SHARDS - 1]
        count = hashes[key] = hashes.get(key, 0) + 1
        if count == 1:
            self._changes[key] = True

    def _removed(self, event: Removed) -> None:
        if event.medium not in GPU or (event.group_idx is not None and event.group_idx != self._group):
            self.ignored_events += 1
            return
        for block in event.block_hashes:
            keys = self._keys[hash(block) & SHARDS - 1]
            if block not in keys:
                continue
            self._copies -= 1
            if more := self._more_copies.pop(block, 0):
                if more > 1:
                    self._more_copies[block] = more - 1
                continue
            self.resident_blocks -= 1
            key = keys.pop(block)
            if key is None:
                self.orphans -= 1
                continue
            hashes = self._hashes[key & SHARDS - 1]
            hashes[key] -= 1
            if not hashes[key]:
                del hashes[key]
                self._changes[key] = False

    def _capacity_blocks(self) -> int:
        if self.capacity_tokens is None or not self.block_tokens:
            return MAX_BLOCKS
        return min(MAX_BLOCKS, self.capacity_tokens // self.block_tokens + 1)

    def _overflowed(self) -> None:
        self._counts_copies = False
        self._more_copies.clear()
        self._copies = self.resident_blocks
        if self._copies > min(4 * self._capacity_blocks(), MAX_BLOCKS):
            self.overflows += 1
            self.drop()  # not this engine's size, or not its events


def _chained(event: Stored, chain: int) -> Iterable[int]:
    """Keys of the event's blocks; media and embeddings in a block change its key."""
    token_bytes, size = packed(event.token_ids), event.block_size
    extra = event.extra_keys
    if not extra or not any(extra):
        return token_keys(token_bytes, size, chain)
    if len(extra) != len(event.block_hashes):
        raise OverflowError("extra keys do not match the blocks")
    width, keys, salt = size * TOKEN_BYTES, [], _salt(event) if event.parent_block_hash is None else None
    for number, entry in enumerate(extra):
        [chain] = token_keys(token_bytes[number * width : (number + 1) * width], size, chain)
        mixed = _besides_adapter(event, entry)
        if number == 0 and salt is not None:
            mixed.remove(salt)
        if mixed:
            chain = xxh3_64_intdigest(repr(mixed).encode("utf-8", "surrogatepass"), chain)
        keys.append(chain)
    return keys


def _besides_adapter(event: Stored, entry: Any) -> list[Any]:
    """A block's extra keys without the name of the LoRA adapter, which begins the chain, as the salt does."""
    keys = list(entry) if isinstance(entry, list) else [] if entry is None else [entry]
    if event.lora_name and event.lora_name in keys:
        keys.remove(event.lora_name)
    return keys


def _salt(event: Stored) -> str | None:
    """The cache salt: the last text among the first block's extra keys."""
    first = _besides_adapter(event, event.extra_keys[0]) if event.extra_keys else []
    return next((key for key in reversed(first) if isinstance(key, str)), None)
