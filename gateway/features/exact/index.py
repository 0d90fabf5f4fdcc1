"""Which engine holds which prefix blocks, by its own KV events; keys are chained xxh3 hashes over token ids.

Unlike the gateway's own record, engines may evict a block before its successors, so a chain can have holes: a prefix
ends at the first missing block. A tokenized prompt and an engine's events give the same keys. An engine's own block
hashes depend on its version and settings and are not used.

The keys are spread over many small dicts: growing one dict of a million keys would stop the event loop for 80 ms.
"""

from array import array
from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

SHARDS = 256  # a power of two


class ExactIndex:
    """The blocks of all engines. Keys come from `token_keys`; engines are numbered from 0, and new numbers may come at
    any time."""

    def __init__(self) -> None:
        self._holders: list[dict[int, int]] = [{} for _ in range(SHARDS)]  # key -> bit mask of engines
        self._live = 0  # bit mask
        self._engines = 0

    def __repr__(self) -> str:
        return f"<ExactIndex {len(self)} keys of {self._engines} engines, live: {self._live:b}>"

    def __len__(self) -> int:
        return sum(map(len, self._holders))

    def live(self, engine: int) -> bool:
        """Whether the engine's blocks are known and current."""
        return bool(self._live >> engine & 1)

    def set_live(self, engine: int, live: bool) -> None:
        """Set whether `depths` uses the engine's blocks, which are kept anyway."""
        self._grow(engine)
        bit = 1 << engine
        self._live = self._live | bit if live else self._live & ~bit

    def update(self, engine: int, added: Iterable[int], removed: Iterable[int]) -> None:
        """Add and remove blocks of the engine. Repetition is harmless."""
        self._grow(engine)
        shards, low, bit = self._holders, SHARDS - 1, 1 << engine
        for key in added:
            holders = shards[key & low]
            holders[key] = holders.get(key, 0) | bit
        others = ~bit
        for key in removed:
            holders = shards[key & low]
            mask = holders.get(key, 0)
            if mask == bit:
                del holders[key]
            elif mask & bit:
                holders[key] = mask & others

    def clear(self, engine: int) -> None:
        """Remove all blocks of the engine. Visits all keys of all engines."""
        bit = 1 << engine
        self.update(engine, (), [key for holders in self._holders for key, mask in holders.items() if mask & bit])

    def depths(self, keys: Sequence[int]) -> list[int]:
        """The number of held leading blocks of each engine; 0 for engines that are not live."""
        depths, stops = [0] * self._engines, []  # masks of engines, and the depth of those
        held, shards, low = self._live, self._holders, SHARDS - 1
        for depth, key in enumerate(keys):
            still = held & shards[key & low].get(key, 0)
            if still != held:
                stops.append((held & ~still, depth))
                held = still
                if not held:
                    break
        else:
            stops.append((held, len(keys)))
        for mask, depth in stops:
            while mask:
                bit = mask & -mask
                depths[bit.bit_length() - 1] = depth
                mask ^= bit
        return depths

    def _grow(self, engine: int) -> None:
        self._engines = max(self._engines, engine + 1)


TOKEN_BYTES = 4
MOST_TOKENS = 524288  # of a prompt that is read exactly: within 20 ms


def token_seed(lora: str | None = None, salt: str | None = None) -> int:
    """The chain's start: the inputs besides a prompt's tokens that determine its usable KV cache blocks."""
    lora, salt = lora or "", salt or ""
    return xxh3_64_intdigest(f"{len(lora)}:{lora}{len(salt)}:{salt}".encode("utf-8", "surrogatepass"))


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit words. Raises OverflowError for an invalid token id."""
    return array("I", token_ids).tobytes()


def token_keys(token_bytes: bytes, block_tokens: int, chain: int) -> tuple[int, ...]:
    """Keys of the full blocks of `packed` token ids; `chain` is a `token_seed` or the key of the block before."""
    width = block_tokens * TOKEN_BYTES
    keys = []
    for start in range(0, len(token_bytes) - width + 1, width):
        chain = xxh3_64_intdigest(token_bytes[start : start + width], chain)
        keys.append(chain)
    return tuple(keys)
