"""The sources of hit predictions (`policy.HitPredictor`): the gateway's own record of the engines' KV caches, and the
recent accuracy of predictions from it.

The own record of a backend is an LRU of block keys, as large as the backend's KV cache. A prompt's blocks count as used
from the last to the first, so a block is always at least as recent as its successors, and eviction never leaves a hole:
the set of backends can only shrink along a chain. Look-ups rely on that and search by bisection. Blocks last used
together are a run: using a prompt again costs O(its runs). An answer is one more block, identified by its prompt.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gateway.core.routing.kv_reservations import alike

_ANSWER: Final = 0x9E3779B97F4A7C15  # makes the key of an answer from the last key of its prompt
_LEAST_BYTES: Final = 64  # minimum size of a block, so that many tiny messages do not make a large record
BLOCK_MEMORY_BYTES = 200  # of a block in the record, about
DEFAULT_MAX_BLOCKS = 1 << 21
_TRIMMED: Final = 8192  # blocks a call, in a few milliseconds
_EVICTED: Final = 256  # for a new prompt, in addition to its own number of blocks


class _Run:
    """Consecutive blocks of one prompt that a backend last used together. The last used runs are at the end of
    `ring`."""

    __slots__ = ("keys", "newer", "older", "sizes")

    def __init__(self, keys: tuple[int, ...], sizes: list[int], ring: "_Run | None" = None) -> None:
        self.keys = keys
        self.sizes = sizes  # bytes of each block
        self.newer: _Run = ring or self
        self.older: _Run = ring.older if ring else self
        self.newer.older = self.older.newer = self

    def leave(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older

    def use(self, ring: "_Run") -> None:
        """Become the last used run of the ring."""
        self.older.newer, self.newer.older = self.newer, self.older
        self.newer, self.older = ring, ring.older
        self.older.newer = ring.older = self


class _Record:
    """The blocks of one backend: runs by their first key, and in a ring from the least recently used one on."""

    __slots__ = ("blocks", "capacity_bytes", "ring", "runs", "used_bytes")

    def __init__(self) -> None:
        self.runs: dict[int, _Run] = {}
        self.ring = _Run((), [])
        self.blocks = self.used_bytes = self.capacity_bytes = 0

    def use(self, keys: tuple[int, ...], edges: tuple[int, ...]) -> int:
        """Hold a prompt's blocks as the last used ones. Returns the number of blocks held before."""
        runs, ring, depth, count = self.runs, self.ring, 0, len(keys)
        found: list[_Run] = []
        while depth < count and (run := runs.get(keys[depth])) is not None:
            shared = alike(keys, run.keys, depth, min(count, depth + len(run.keys)), depth) - depth
            found.append(run if shared == len(run.keys) else self._divide(run, shared))
            depth += shared
        if depth < count:
            sizes: list[int] = []
            last = edges[depth - 1] if depth else 0
            for edge in edges[depth:]:
                sizes.append(edge - last if edge - last > _LEAST_BYTES else _LEAST_BYTES)
                last = edge
            self.blocks += len(sizes)
            self.used_bytes += sum(sizes)
            runs[keys[depth]] = _Run(keys[depth:], sizes, ring)
        while found:
            found.pop().use(ring)
        return depth

    def _divide(self, run: _Run, count: int) -> _Run:
        """Split off the first blocks of a run; the others keep their place in the ring."""
        first = self.runs[run.keys[0]] = _Run(run.keys[:count], run.sizes[:count], self.ring)
        run.keys, run.sizes = run.keys[count:], run.sizes[count:]
        self.runs[run.keys[0]] = run
        return first

    def resize(self, capacity_bytes: int) -> None:
        """Follow another size; blocks beyond it are evicted later."""
        self.capacity_bytes = capacity_bytes

    def evict(self, capacity: int, most_blocks: int, at_most: int) -> list[int]:
        """Remove the least recently used blocks until the others fit into `capacity` bytes and `most_blocks`, at most
        `at_most`; returns their keys."""
        used, blocks = self.used_bytes, self.blocks
        evicted: list[int] = []
        least = blocks - at_most if blocks > at_most else 0
        while blocks > least and (used > capacity or blocks > most_blocks):
            run = self.ring.newer
            keys, sizes = run.keys, run.sizes
            while sizes and blocks > least and (used > capacity or blocks > most_blocks):
                used -= sizes.pop()
                blocks -= 1
                evicted.append(keys[len(sizes)])
            run.keys = keys[: len(sizes)]
            if not sizes:
                run.leave()
                self.runs.pop(keys[0], None)
        self.used_bytes, self.blocks = used, blocks
        return evicted

    def latest(self, most: int) -> list[tuple[tuple[int, ...], list[int]]]:
        """Keys and sizes of at most `most` last used runs, the last used one at the end."""
        found: list[tuple[tuple[int, ...], list[int]]] = []
        run = self.ring.older
        while run is not self.ring and len(found) < most:
            found.append((run.keys, run.sizes))
            run = run.older
        found.reverse()
        return found

    def remove(self, key: int) -> bool:
        """Remove the run of one block that has this key; returns whether there was one."""
        run = self.runs.get(key)
        if run is None or len(run.sizes) > 1:
            return False
        run.leave()
        del self.runs[key]
        self.used_bytes -= run.sizes[0]
        self.blocks -= 1
        return True


class PrefixIndex:
    """Owner of the records. Keys and edges are from `prompt_blocks.prefix_keys`; backends are numbered from 0.

    `max_blocks` bounds the memory of all records together (`BLOCK_MEMORY_BYTES` each). A lower bound takes effect
    gradually, in `trim` and `record`: forgetting a large record takes longer than requests should wait.
    """

    def __init__(self, capacities_bytes: Sequence[int], max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        self._holders: dict[int, int] = {}  # key -> bit mask of backends
        self._records: list[_Record] = []
        self._max_blocks = max_blocks
        self._share = max_blocks  # of each backend
        for backend, capacity in enumerate(capacities_bytes):
            self.resize(backend, capacity)

    def __repr__(self) -> str:
        sizes = ", ".join(str(record.blocks) for record in self._records)
        return f"<PrefixIndex {len(self._holders)} keys; blocks by backend: {sizes}>"

    def used_bytes(self, backend: int) -> int:
        return self._records[backend].used_bytes

    def blocks(self, backend: int) -> int:
        return self._records[backend].blocks

    def resize(self, backend: int, capacity_bytes: int) -> None:
        """Follow a new size of the backend's KV cache, or begin the record of a new one."""
        while backend >= len(self._records):
            self._records.append(_Record())
            self._share = self._max_blocks // len(self._records)
        self._records[backend].resize(capacity_bytes)

    def apply(self, max_blocks: int) -> None:
        """Take over another bound of all records."""
        self._max_blocks = max_blocks
        self._share = max_blocks // max(1, len(self._records))

    def trim(self, at_most: int = _TRIMMED) -> None:
        """Forget at most `at_most` blocks beyond the bounds; to be called now and then."""
        for backend, record in enumerate(self._records):
            if record.used_bytes > record.capacity_bytes or record.blocks > self._share:
                evicted = record.evict(record.capacity_bytes, self._share, at_most)
                self._drop(backend, evicted)
                at_most -= len(evicted)

    def shrink(self, backend: int, held_bytes: int) -> None:
        """The backend holds at most this much now: forget the least recently used blocks."""
        record = self._records[backend]
        if record.used_bytes > held_bytes:
            self._drop(backend, record.evict(held_bytes, self._share, record.blocks))

    def depths(self, keys: tuple[int, ...]) -> list[int]:
        """The number of leading blocks that each backend holds."""
        depths, count = [0] * len(self._records), len(keys)
        if count and (first := self._holders.get(keys[0], 0)):
            if whole := self._holders.get(keys[-1], 0):
                self._find_ends(depths, keys, count - 1, count, whole)
            if others := first & ~whole:
                self._find_ends(depths, keys, 0, count - 1, others)
        return depths

    def _find_ends(self, depths: list[int], keys: tuple[int, ...], low: int, high: int, held: int) -> None:
        """Set the depths of backends that hold block `low`, but not block `high`."""
        while held and high - low > 1:
            middle = (low + high) // 2
            further = self._holders.get(keys[middle], 0) & held
            if further != held:
                self._find_ends(depths, keys, low, middle, held & ~further)
            low, held = middle, further
        while held:
            bit = held & -held
            depths[bit.bit_length() - 1] = high
            held ^= bit

    def holders(self, key: int) -> list[int]:
        mask = self._holders.get(key, 0)
        return [backend for backend in range(mask.bit_length()) if mask >> backend & 1]

    def answered(self, prompt_key: int) -> int:
        """Bit mask of the backends that hold an answer to the prompt with this last key."""
        return self._holders.get(prompt_key ^ _ANSWER, 0)

    def record(self, backend: int, keys: tuple[int, ...], edges: tuple[int, ...]) -> None:
        """A prompt with these blocks was sent to the backend: it holds them now, most recently used."""
        record, holders, bit = self._records[backend], self._holders, 1 << backend
        for at in range(record.use(keys, edges), len(keys)):
            key = keys[at]
            holders[key] = holders.get(key, 0) | bit
        if record.used_bytes > record.capacity_bytes or record.blocks > self._share:
            self._drop(backend, record.evict(record.capacity_bytes, self._share, len(keys) + _EVICTED))

    def runs(self, backend: int, most: int) -> list[tuple[tuple[int, ...], list[int]]]:
        """At most `most` last used runs of blocks, with their sizes, the last used one at the end.

        The sizes are not copied: the last ones may be removed before they are read.
        """
        return self._records[backend].latest(most)

    def record_answer(self, backend: int, prompt_key: int, size_bytes: int) -> None:
        """The backend has answered the prompt with this last key; the answer's tokens are cached behind it."""
        if self._holders.get(prompt_key, 0) >> backend & 1:  # else the prompt was evicted, and so were its successors
            self.record(backend, (prompt_key ^ _ANSWER,), (size_bytes,))

    def supersede_answer(self, backend: int, prompt_key: int) -> bool:
        """The answer came back in a longer prompt, whose blocks replace it. Returns whether it was recorded."""
        is_known = self._records[backend].remove(prompt_key ^ _ANSWER)
        if is_known:
            self._drop(backend, [prompt_key ^ _ANSWER])
        return is_known

    def wipe(self, backend: int) -> None:
        self.shrink(backend, 0)

    def _drop(self, backend: int, keys: list[int]) -> None:
        """Note that the backend lost these blocks. Two may have the same hash, so one may be gone already."""
        holders, others = self._holders, ~(1 << backend)
        for key in keys:
            mask = holders.get(key, 0)
            if left := mask & others:
                holders[key] = left
            elif mask:
                del holders[key]


_WEIGHT: Final = 0.2
_LEAST_TOKENS: Final = 64  # predicted; smaller hits are ignored
_GOOD_ENOUGH: Final = 0.8  # no correction above: partly filled blocks and prompts still in prefill cost some hits
_LOW: Final = 0.5
_LEAST: Final = 0.1  # share: predictions must stay large enough to be confirmed


class HitAccuracy:
    """Share of the predicted hit tokens that each engine has recently confirmed.

    `on_change` is called with an engine, its share, and whether predictions hold there again or have begun to fail.
    """

    def __init__(self, on_change: Callable[[int, float, bool], None] | None = None) -> None:
        self._shares: dict[int, float] = {}
        self.lowered: dict[int, float] = {}  # shares of engines whose predictions do not hold
        self._low: set[int] = set()
        self._on_change = on_change

    def share(self, engine: int) -> float:
        """Factor for predicted hits there: 1 while predictions hold."""
        return self.lowered.get(engine, 1.0)

    def observed(self, engine: int, predicted_tokens: int, actual_tokens: int) -> None:
        """Learn from a request: its predicted hit before the discount, and the hit that the engine reported."""
        if predicted_tokens < _LEAST_TOKENS:
            return
        known = self._shares.get(engine, 1.0)
        lately = min(1.0, actual_tokens / predicted_tokens)
        share = self._shares[engine] = max(_LEAST, known + _WEIGHT * (lately - known))
        if share < _GOOD_ENOUGH:
            self.lowered[engine] = share
        else:
            self.lowered.pop(engine, None)
        if engine not in self._low and share < _LOW:
            self._low.add(engine)
        elif engine in self._low and share >= _GOOD_ENOUGH:
            self._low.remove(engine)
        else:
            return
        if self._on_change is not None:
            self._on_change(engine, share, share >= _GOOD_ENOUGH)

    def start_from(self, engine: int, share: float) -> None:
        """Continue from the share learned by another process."""
        self._shares[engine] = share
        if share < _GOOD_ENOUGH:
            self.lowered[engine] = share

    def reset(self, engine: int) -> None:
        """Forget the learned share: another process with another cache answers there."""
        self._shares.pop(engine, None)
        self.lowered.pop(engine, None)
        self._low.discard(engine)


class EngineBlocks(Protocol):
    """Exactly known blocks in engines' caches; keys are a demand's `token_keys`."""

    def depths(self, keys: Sequence[int]) -> dict[int, int]:
        """The number of leading blocks on each engine with known blocks, including recently sent ones."""

    def placed(self, engine: int, keys: Sequence[int]) -> None:
        """A prompt with these blocks was sent to the engine."""
