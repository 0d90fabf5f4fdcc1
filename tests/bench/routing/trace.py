"""Traces whose prompts are named block by block, such as `scaled16` files.

Blocks have 16 tokens; two rows share a prompt's beginning exactly as far as their `hash_ids` are equal.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path

from loadtest.workloads.trace import TraceError
from loadtest.workloads.trace import read_trace as recorded

BLOCK_TOKENS = 16
_CROWD_BLOCKS = 16
_CROWD_TAIL_TOKENS = 15
_CROWD_ID = 1 << 60


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. `at` is seconds from the trace's start."""

    at: float
    hash_ids: tuple[int, ...]
    tail_tokens: int
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        return BLOCK_TOKENS * len(self.hash_ids) + self.tail_tokens


def read_trace(path: Path) -> list[Row]:
    """All rows of a file, in order, the first at time zero. Raises TraceError."""
    return [
        Row(row.at_seconds, row.keys, row.prompt_tokens - BLOCK_TOKENS * len(row.keys), row.output_tokens)
        for row in recorded(path, BLOCK_TOKENS).rows
    ]


def spread(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """Rows of one moment, which coarse clocks make, become rows spread at random up to the next moment."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.at)]
    starts = [group[0].at for group in groups]
    lengths = [after - before for before, after in pairwise(starts)]
    lengths.append(sorted(lengths)[len(lengths) // 2] if lengths else 0.0)
    found: list[Row] = []
    for group, length in zip(groups, lengths, strict=True):
        if len(group) == 1:
            found += group
        else:
            moments = sorted(rng.uniform(0, length) for _ in group)
            found += [replace(row, at=row.at + moment) for row, moment in zip(group, moments, strict=True)]
    return found


def slice_of(rows: Sequence[Row], skip: int, limit: int | None) -> list[Row]:
    """Some consecutive rows, the first at time zero."""
    chosen = rows[skip : None if limit is None else skip + limit]
    if not chosen:
        raise TraceError(f"nothing is left of {len(rows)} rows after the first {skip}")
    return [replace(row, at=row.at - chosen[0].at) for row in chosen]


def own_rate(rows: Sequence[Row]) -> float:
    """Requests per second of the trace itself."""
    return len(rows) / max(rows[-1].at - rows[0].at, 1e-9)


def at_rate(rows: Sequence[Row], requests_per_second: float) -> list[Row]:
    """The same rows, closer together or further apart."""
    scale = own_rate(rows) / requests_per_second
    return [replace(row, at=row.at * scale) for row in rows]


def with_crowd(rows: Sequence[Row]) -> list[Row]:
    """A flash crowd: between 40 and 60 % of the time as many requests again, all with one new long prefix."""
    length = rows[-1].at
    inside = [row for row in rows if 0.4 * length <= row.at < 0.6 * length]
    prefix = tuple(range(_CROWD_ID, _CROWD_ID + _CROWD_BLOCKS))
    crowd = [Row(row.at, prefix, _CROWD_TAIL_TOKENS, row.output_tokens) for row in inside]
    return sorted([*rows, *crowd], key=lambda row: row.at)


def ideal_hit_ratio(rows: Sequence[Row], block_tokens: int) -> float:
    """Share of the prompts' tokens that one engine with an endless cache of such blocks would find in it."""
    seen: set[int] = set()
    hit = 0
    for row in rows:
        shared = BLOCK_TOKENS * sum(1 for _ in takewhile(seen.__contains__, row.hash_ids))
        hit += min(shared, row.input_tokens - 1) // block_tokens * block_tokens
        seen.update(row.hash_ids)
    return hit / sum(row.input_tokens for row in rows)
