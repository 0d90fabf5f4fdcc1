"""Blocks of engines: how replicas divide slots and KV tokens, so that no cap is exceeded. Pure.

Each replica has a record in the fleet's table (`store.py`), with its block of each engine, and changes only this one.
Its use never exceeds the table: it gives up a part before it writes that, and uses a larger block after the table has
it. So the blocks in the table add up to the cap at most, and so do the requests in flight.

A block lapses when its replica has not renewed it for `HOLD_SECONDS`. That replica then uses no more than an even part,
and the others keep its whole block free: it may be cut off, and its requests go on. They take the block of a replica
that has been silent for `SILENT_SECONDS` and whose process has certainly ended: the operating system has closed its
connections, including those to the engines, which abort its requests. They take any block after `MISSING_SECONDS`.

Clocks are never compared: each replica measures the age of a record by its own monotonic clock.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from gateway.core.routing.engine import EngineUse
from gateway.features.coordination.records import Records, ReplicaRecord

HOLD_SECONDS: Final = 2.5  # from before a call was sent that renewed the block
SILENT_SECONDS: Final = 3.0  # after an answer without a renewal: longer, so the block has lapsed
CLOSED_SECONDS: Final = 60.0  # of silence; a connection that closes later may have been closed by keep-alive probes
MISSING_SECONDS: Final = 600.0  # no request of a replica that is cut off is expected to last longer
NONE: Final = EngineUse(0, 0)


class Wish(NamedTuple):
    """One engine, as a replica sees it. `used`: in flight; `wanted`: including waiting requests; `need`: of the largest
    waiting request; `whole`: slots and KV tokens that all replicas may use together, 0 tokens = not known."""

    used: EngineUse
    wanted: EngineUse
    need: EngineUse
    whole: EngineUse


def targets(total: int, rows: list[tuple[int, int]]) -> list[int]:
    """How to divide this many slots, or tokens, by (need, wanted), first come first: the largest request of each, if
    possible; the rest in proportion to the remaining wishes, or evenly if there is enough for all."""
    left, parts, more = max(0, total), [], []
    for need, wanted in rows:
        part = min(need, left)
        left -= part
        parts.append(part)
        more.append(max(0, wanted - part))
    asked = sum(more)
    if asked <= left:
        each, rest = divmod(left - asked, max(1, len(rows)))
        return [part + extra + each + (at < rest) for at, (part, extra) in enumerate(zip(parts, more, strict=True))]
    given = [left * extra // asked for extra in more]
    rest = left - sum(given)
    for at, extra in enumerate(more):
        if rest and given[at] < extra:
            given[at] += 1
            rest -= 1
    return [part + extra for part, extra in zip(parts, given, strict=True)]


def both(one: EngineUse, other: EngineUse, how: Callable[[int, int], int]) -> EngineUse:
    """Combine slots with slots, and tokens with tokens."""
    return EngineUse(how(one.slots, other.slots), how(one.kv_tokens, other.kv_tokens))


def blocks_of(records: Records, key: str, without: str) -> EngineUse:
    """The sum of all blocks of an engine, except for one replica's."""
    slots = tokens = 0
    for replica, record in records.items():
        share = record.shares.get(key)
        if share is not None and replica != without:
            slots += share.block.slots
            tokens += share.block.kv_tokens
    return EngineUse(slots, tokens)


def carried(memory: Records, found: Records, without: str) -> Records:
    """Records of the lost table that the new one lacks: their blocks may still be in use.

    Each counts with the free rest, which its replica may have taken in the meantime.
    """
    wholes: dict[str, EngineUse] = {}
    for record in memory.values():
        for key, share in record.shares.items():
            wholes[key] = both(wholes.get(key, NONE), share.whole, max)
    free = {key: both(whole, blocks_of(memory, key, ""), _rest) for key, whole in wholes.items()}
    kept: Records = {}
    for replica, record in memory.items():
        known = found.get(replica)
        if replica == without or (known is not None and known.number > record.number):
            continue
        shares = dict(record.shares) if known is None else {**record.shares, **known.shares}
        for key, share in record.shares.items():
            most = both(share.block, free[key], int.__add__)
            if known is not None and key in known.shares:
                most = both(most, known.shares[key].block, max)
            shares[key] = msgspec.structs.replace(share, block=most)
        kept[replica] = ReplicaRecord(record.number, "", record.age_seconds, shares)
    return kept


def _rest(whole: int, taken: int) -> int:
    return max(0, whole - taken)
