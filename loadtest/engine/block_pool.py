"""KV cache blocks: reference counts, an LRU list of free blocks, and the index of cached prefix blocks."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from loadtest.engine.cache_observer import CacheObserver


class BlockPool:
    """Owns every block. A block is free when nobody refers to it; a free block stays cached until it is reused."""

    def __init__(self, num_blocks: int, observer: CacheObserver | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._observer = observer
        self._references = [0] * num_blocks
        self._key_of: list[int | None] = [None] * num_blocks
        # The first block that got a key; further blocks with the same content, for the few keys that have any.
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        # Head: given out first. First those that hold nothing worth keeping, then the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, cached or not."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Keys by which a block can be found."""
        return len(self._cached)

    def cached_keys(self) -> dict[int, int]:
        """The keys by which blocks can be found, each with how many blocks have it."""
        copies = self._copies
        return {key: 1 + len(copies.get(key, ())) for key in self._cached}

    def find(self, keys: Sequence[int], max_blocks: int) -> list[int]:
        """The blocks that hold the longest cached prefix of `keys`, at most `max_blocks`."""
        found: list[int] = []
        get = self._cached.get
        for key in keys[:max_blocks]:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would leave the free list if they were taken."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def take_cached(self, blocks: Iterable[int]) -> None:
        """Refer once more to blocks given by `find`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, least recently used first; their old content is forgotten."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        pop, references, key_of = self._free.popitem, self._references, self._key_of
        cached, copies, observer = self._cached, self._copies, self._observer
        taken = []
        for _ in range(count):
            block = pop(last=False)[0]
            taken.append(block)
            references[block] = 1
            key = key_of[block]
            if key is not None:
                key_of[block] = None
                if key in copies:
                    self._forget_copy(block, key)
                else:
                    del cached[key]
                if observer is not None:
                    observer.on_removed(key)
        return taken

    def register(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Make full blocks findable by key. The first block with a key is found until it is reused, then the next."""
        cached, copies, key_of = self._cached, self._copies, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if key in cached:
                copies.setdefault(key, []).append(block)
            else:
                cached[key] = block
                if copies:
                    copies.pop(key, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Give one sequence's blocks back. Its tail is reused first, because its head is the likelier prefix."""
        references, free, key_of = self._references, self._free, self._key_of
        worthless = []
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                free[block] = None
                if key_of[block] is None:
                    worthless.append(block)
        for block in reversed(worthless):
            free.move_to_end(block, last=False)

    def reset_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        if self.num_used:
            return False
        self._cached.clear()
        self._copies.clear()
        self._key_of = [None] * self.num_blocks
        if self._observer is not None:
            self._observer.on_cleared()
        return True

    def _forget_copy(self, block: int, key: int) -> None:
        """One of several blocks with the same key is about to be overwritten."""
        copies = self._copies[key]
        if self._cached[key] == block:
            self._cached[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]
