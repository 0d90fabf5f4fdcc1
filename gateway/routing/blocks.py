"""Prompt bytes to prefix blocks: chained xxh3 hashes, cut at the end of every message and at growing steps between.

Two prompts share their first k keys exactly when they share the bytes before the k-th edge, message by message (and the
seed). Steps grow with their position, from 256 bytes to 4 KiB: text that diverges inside a message costs at most an
eighth of the hit (or 256 bytes), and a 200 KB prompt has a hundred keys, not thousands. What is shared by whole
messages (a system prompt, the turns before) is found to its last byte.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

_SIZES = ((256, 4096), (512, 8192), (1024, 16384), (2048, 32768), (4096, 2097152))
LONGEST_BYTES = _SIZES[-1][1]


def _spans() -> tuple[tuple[int, int], ...]:
    spans, start = [], 0
    for size, end in _SIZES:
        spans += [(at, at + size) for at in range(start, end, size)]
        start = end
    return tuple(spans)


_SPANS = _spans()
_EDGES = tuple(end for _, end in _SPANS)


def seed(*parts: str) -> int:
    """The chain's start: everything outside the prompt that changes its KV cache (model, LoRA, cache salt, tenant)."""
    return xxh3_64_intdigest("\0".join(f"{len(part)}:{part}" for part in parts).encode())


class Blocks(NamedTuple):
    """Keys of a prompt's blocks, its length in bytes up to the end of each, and how many there are up to the end of
    each piece."""

    keys: tuple[int, ...]
    edges: tuple[int, ...]
    ends: tuple[int, ...]


def prefix_keys(pieces: Sequence[bytes], chain: int) -> Blocks:
    """The prompt's blocks.

    `pieces` are its messages, `chain` is a `seed`. Text beyond 2 MiB has no key.
    """
    keys: list[int] = []
    edges: list[int] = []
    ends: list[int] = []
    digest, position = xxh3_64_intdigest, 0
    sizes = iter(_SIZES)
    step, until = next(sizes)
    for piece in pieces:
        length = len(piece)
        if position + length > LONGEST_BYTES:
            piece, length = piece[: LONGEST_BYTES - position], LONGEST_BYTES - position
        if position == 0:  # the usual case of one long message costs no arithmetic
            full = bisect_right(_EDGES, length)
            for start, end in _SPANS[:full]:
                chain = digest(piece[start:end], chain)
                keys.append(chain)
            edges += _EDGES[:full]
            at = edges[-1] if full else 0
        else:
            at = 0
            while True:
                while position + at >= until:
                    step, until = next(sizes, (step, LONGEST_BYTES))
                if length - at <= step:
                    break
                chain = digest(piece[at : at + step], chain)
                at += step
                keys.append(chain)
                edges.append(position + at)
        if at < length:
            chain = digest(piece[at:] if at else piece, chain)
            keys.append(chain)
            edges.append(position + length)
        ends.append(len(keys))
        position += length
        if position >= LONGEST_BYTES:
            break
    return Blocks(tuple(keys), tuple(edges), tuple(ends))
