"""KV cache blocks: reference counts, an LRU list of free blocks, and the index of cached prefix blocks."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Owns every block. A block is free when nobody refers to it; a free block stays cached until it is reused."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key_of: list[int | None] = [None] * num_blocks
        self._cached: dict[int, int] = {}
        # Head: least recently used, given out first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, cached or not."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody refers to."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by key."""
        return len(self._cached)

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
        taken = []
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            key = self._key_of[block]
            if key is not None:
                del self._cached[key]
                self._key_of[block] = None
            self._references[block] = 1
            taken.append(block)
        return taken

    def register(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Make full blocks findable by key. The first block with a key keeps it."""
        for block, key in zip(blocks, keys, strict=True):
            if key not in self._cached and self._key_of[block] is None:
                self._cached[key] = block
                self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give one sequence's blocks back. Its tail is reused first, because its head is the likelier prefix."""
        references, free = self._references, self._free
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                free[block] = None

    def reset_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        if self.num_used:
            return False
        self._cached.clear()
        self._key_of = [None] * self.num_blocks
        return True
