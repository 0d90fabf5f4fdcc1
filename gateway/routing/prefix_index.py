"""Which backend holds which prefix blocks: the gateway's own record of what it sent where.

The record of a backend is an LRU of block keys, as large as the backend's KV cache. A prompt's blocks are touched from
the last to the first, so a block is always at least as recent as its successors, and eviction never leaves a hole: the
set of backends can only shrink along a chain. Look-ups rely on that and search by bisection.

An answer is one more block, known not by its text but by the prompt that it followed.
"""

from collections import OrderedDict
from collections.abc import Sequence

_ANSWER = 0x9E3779B97F4A7C15  # makes the key of an answer from the last key of its prompt
_LEAST_BYTES = 64  # that a block is counted with, so that many tiny messages do not make a large record
BLOCK_MEMORY_BYTES = 200  # of a block in the record, about
DEFAULT_MAX_BLOCKS = 1 << 21


class PrefixIndex:
    """Owner of the record. Keys and edges are those of `routing.blocks.prefix_keys`; backends are numbered from 0.

    `max_blocks` bounds the memory of all records together (`BLOCK_MEMORY_BYTES` each).
    """

    def __init__(self, capacities_bytes: Sequence[int], max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._holders: dict[int, int] = {}  # key -> bit mask of backends
        self._records: list[OrderedDict[int, int]] = []  # key -> bytes
        self._used_bytes: list[int] = []
        self._capacities_bytes: list[int] = []
        self._max_blocks = max_blocks
        self._share = max_blocks  # of each backend
        for backend, capacity in enumerate(capacities_bytes):
            self.resize(backend, capacity)

    def __repr__(self) -> str:
        sizes = ", ".join(str(len(record)) for record in self._records)
        return f"<PrefixIndex {len(self._holders)} keys; blocks by backend: {sizes}>"

    def used_bytes(self, backend: int) -> int:
        """Prompt bytes that the record says are cached on a backend."""
        return self._used_bytes[backend]

    def blocks(self, backend: int) -> int:
        return len(self._records[backend])

    def resize(self, backend: int, capacity_bytes: int) -> None:
        """Follow a new size of the backend's KV cache, or begin the record of a new one."""
        if backend >= len(self._records):
            self._grow(backend + 1)
        self._capacities_bytes[backend] = capacity_bytes
        self._evict(backend)

    def _grow(self, backends: int) -> None:
        while len(self._records) < backends:
            self._records.append(OrderedDict())
            self._used_bytes.append(0)
            self._capacities_bytes.append(0)
        self._share = self._max_blocks // backends
        for backend, record in enumerate(self._records):
            if len(record) > self._share:
                self._evict(backend)

    def shrink(self, backend: int, held_bytes: int) -> None:
        """The backend holds no more than this now: forget what was least recently used."""
        if self._used_bytes[backend] > held_bytes:
            capacity, self._capacities_bytes[backend] = self._capacities_bytes[backend], held_bytes
            self._evict(backend)
            self._capacities_bytes[backend] = capacity

    def depths(self, keys: Sequence[int]) -> list[int]:
        """For each backend, how many of the leading blocks it holds."""
        depths = [0] * len(self._records)
        if not keys:
            return depths
        first = self._holders.get(keys[0], 0)
        if first:
            last = self._holders.get(keys[-1], 0)
            self._descend(keys, 0, first, len(keys) - 1, last, depths)
            _assign(depths, last, len(keys))
        return depths

    def _descend(self, keys: Sequence[int], low: int, held: int, high: int, kept: int, depths: list[int]) -> None:
        """Find where each backend that holds block `low` but not block `high` stops."""
        while lost := held & ~kept:
            if high - low == 1:
                _assign(depths, lost, high)
                return
            middle = (low + high) // 2
            between = self._holders.get(keys[middle], 0) & held
            self._descend(keys, low, held, middle, between, depths)
            low, held = middle, between

    def holders(self, key: int) -> list[int]:
        """The backends that hold a block."""
        mask = self._holders.get(key, 0)
        return [backend for backend in range(mask.bit_length()) if mask >> backend & 1]

    def answered(self, prompt_key: int) -> int:
        """Bit mask of the backends that hold an answer to the prompt whose last key this is."""
        return self._holders.get(prompt_key ^ _ANSWER, 0)

    def record(self, backend: int, keys: Sequence[int], edges: Sequence[int]) -> None:
        """A prompt with these blocks was sent to the backend: it holds them now, most recently used."""
        record, holders, bit = self._records[backend], self._holders, 1 << backend
        touch, added = record.move_to_end, 0
        for place in range(len(keys) - 1, -1, -1):
            key = keys[place]
            if key in record:
                touch(key)
            else:
                size = max(_LEAST_BYTES, edges[place] - (edges[place - 1] if place else 0))
                record[key] = size
                added += size
                holders[key] = holders.get(key, 0) | bit
        if added:
            self._used_bytes[backend] += added
            if self._used_bytes[backend] > self._capacities_bytes[backend] or len(record) > self._share:
                self._evict(backend)

    def record_answer(self, backend: int, prompt_key: int, size_bytes: int) -> None:
        """The backend has answered the prompt whose last key this is; the answer's tokens are cached behind it."""
        if prompt_key in self._records[backend]:  # else it is gone already, and so is what followed it
            self.record(backend, (prompt_key ^ _ANSWER,), (size_bytes,))

    def supersede_answer(self, backend: int, prompt_key: int) -> None:
        """The answer came back as part of a longer prompt, whose blocks now stand for it."""
        key = prompt_key ^ _ANSWER
        length = self._records[backend].pop(key, 0)
        if length:
            self._used_bytes[backend] -= length
            self._drop(key, 1 << backend)

    def wipe(self, backend: int) -> None:
        self.shrink(backend, 0)

    def _evict(self, backend: int) -> None:
        record, bit = self._records[backend], 1 << backend
        used, capacity = self._used_bytes[backend], self._capacities_bytes[backend]
        while record and (used > capacity or len(record) > self._share):
            key, length = record.popitem(last=False)
            used -= length
            self._drop(key, bit)
        self._used_bytes[backend] = used

    def _drop(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def _assign(depths: list[int], mask: int, depth: int) -> None:
    while mask:
        bit = mask & -mask
        depths[bit.bit_length() - 1] = depth
        mask ^= bit
