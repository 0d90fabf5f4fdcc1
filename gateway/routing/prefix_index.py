"""Which backend holds which prefix blocks: the gateway's own record of what it sent where.

The record of a backend is an LRU of block keys, as large as the backend's KV cache. A prompt's blocks are touched from
the last to the first, so a block is always at least as recent as its successors, and eviction never leaves a hole: the
set of backends can only shrink along a chain. Look-ups rely on that and search by bisection.
"""

from collections import OrderedDict
from collections.abc import Sequence

from gateway.routing.blocks import LENGTHS


class PrefixIndex:
    """Owner of the record. Keys are those of `routing.blocks.prefix_keys`; backends are numbered from 0."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        self._holders: dict[int, int] = {}  # key -> bit mask of backends
        self._records: list[OrderedDict[int, int]] = [OrderedDict() for _ in capacities_bytes]  # key -> bytes
        self._used_bytes = [0] * len(capacities_bytes)
        self._capacities_bytes = list(capacities_bytes)

    def __repr__(self) -> str:
        sizes = ", ".join(str(len(record)) for record in self._records)
        return f"<PrefixIndex {len(self._holders)} keys; blocks by backend: {sizes}>"

    def used_bytes(self, backend: int) -> int:
        """Prompt bytes that the record says are cached on a backend."""
        return self._used_bytes[backend]

    def resize(self, backend: int, capacity_bytes: int) -> None:
        """Follow a new size of the backend's KV cache."""
        self._capacities_bytes[backend] = capacity_bytes
        self._evict(backend)

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

    def record(self, backend: int, keys: Sequence[int]) -> None:
        """A prompt with these blocks was sent to the backend: it holds them now, most recently used."""
        record, holders, bit = self._records[backend], self._holders, 1 << backend
        touch, added = record.move_to_end, 0
        for key, length in zip(reversed(keys), reversed(LENGTHS[: len(keys)]), strict=True):
            if key in record:
                touch(key)
            else:
                record[key] = length
                added += length
                holders[key] = holders.get(key, 0) | bit
        self._used_bytes[backend] += added
        if self._used_bytes[backend] > self._capacities_bytes[backend]:
            self._evict(backend)

    def wipe(self, backend: int) -> None:
        """The backend's cache is gone."""
        capacity, self._capacities_bytes[backend] = self._capacities_bytes[backend], 0
        self._evict(backend)
        self._capacities_bytes[backend] = capacity

    def _evict(self, backend: int) -> None:
        record, holders, others = self._records[backend], self._holders, ~(1 << backend)
        used, capacity = self._used_bytes[backend], self._capacities_bytes[backend]
        while record and used > capacity:
            key, length = record.popitem(last=False)
            used -= length
            left = holders[key] & others
            if left:
                holders[key] = left
            else:
                del holders[key]
        self._used_bytes[backend] = used


def _assign(depths: list[int], mask: int, depth: int) -> None:
    while mask:
        bit = mask & -mask
        depths[bit.bit_length() - 1] = depth
        mask ^= bit
