"""Prompt bytes to prefix blocks: chained xxh3 hashes at fixed edges.

Two prompts share their first k block keys exactly when they share the first `EDGES[k - 1]` bytes (and the seed).
Blocks grow with their position, from 256 bytes to 4 KiB: what a hit is short of is an eighth of it on average, and a
200 KB prompt has 73 keys, not thousands.
"""

from bisect import bisect_right

from xxhash import xxh3_64_intdigest

_SIZES = ((256, 512), (512, 4096), (1024, 8192), (2048, 65536), (4096, 2097152))


def _edges() -> tuple[int, ...]:
    edges, position = [], 0
    for size, end in _SIZES:
        while position < end:
            position += size
            edges.append(position)
    return tuple(edges)


EDGES = _edges()
LENGTHS = tuple(end - start for start, end in zip((0, *EDGES), EDGES, strict=False))  # bytes of each block
_SPANS = tuple(zip((0, *EDGES), EDGES, strict=False))


def seed(*parts: str) -> int:
    """The chain's start: everything outside the prompt that changes its KV cache (model, LoRA, cache salt, tenant)."""
    return xxh3_64_intdigest("\0".join(f"{len(part)}:{part}" for part in parts).encode())


def prefix_keys(prompt: bytes, chain: int) -> tuple[int, ...]:
    """Keys of the prompt's full blocks; `chain` is a `seed`. Text beyond the last edge (2 MiB) has no key."""
    keys = []
    for start, end in _SPANS[: bisect_right(EDGES, len(prompt))]:
        chain = xxh3_64_intdigest(prompt[start:end], chain)
        keys.append(chain)
    return tuple(keys)


def bytes_of(blocks: int) -> int:
    """Length of the prompt that the first `blocks` blocks cover."""
    return EDGES[blocks - 1] if blocks else 0
