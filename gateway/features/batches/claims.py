"""Which lines of a batch a gateway runs: ranges that it claims, for some seconds if several share the batch. Pure.

All times are those of the database that keeps the claims, so the clocks of the gateways need not agree.
"""

from collections.abc import Collection, Sequence
from math import inf
from typing import Final, NamedTuple

CLAIM_SECONDS: Final = 10.0  # a gateway that was not heard of for so long has lost its claims
_LEAST_LINES: Final = 64
_MOST_LINES: Final = 4096


class Claim(NamedTuple):
    """Lines from `first` to before `end`, claimed by a gateway until a time in Unix seconds.

    The range without lines after the last line stands for the end of the batch: its holder writes the output.
    `is_done`: every line of it has an answer on disk.
    """

    first: int
    end: int
    holder: str
    until: float
    is_done: bool = False

    def as_of(self, holder: str, held: Collection[int]) -> "Claim":
        """The claim as its own holder knows it, whatever the database has: held, or lost."""
        if self.holder != holder:
            return self
        return self._replace(until=inf if self.first in held else 0.0)

    @property
    def is_last(self) -> bool:
        return self.first == self.end


class Progress(NamedTuple):
    """All that is known of a batch when a gateway claims lines of it; `claims` in the order of the lines.

    `is_over`: no more lines are started, because the batch was cancelled or its window has closed.
    """

    total: int
    claims: Sequence[Claim]
    is_over: bool

    @property
    def is_complete(self) -> bool:
        """Whether all lines have an answer on disk."""
        lines = [claim for claim in self.claims if not claim.is_last]
        return _claimed(lines) >= self.total and all(claim.is_done for claim in lines)


def next_claim(progress: Progress, holder: str, gateways: int, now: float) -> Claim | None:
    """The next claim of one of so many gateways; None = nothing to do now.

    Lost claims are taken over first. New ones are half of an equal share of what is left, so that gateways of unequal
    speed finish together. 0 gateways: no other can come, so a claim has all lines, and lasts until it is released.
    """
    claims, until = progress.claims, now + (CLAIM_SECONDS if gateways else inf)
    lost = [claim for claim in claims if not claim.is_done and claim.until <= now]
    if claims and claims[-1].is_last:
        return claims[-1]._replace(holder=holder, until=until) if lost and lost[-1].is_last else None
    first = _claimed(claims)
    if not progress.is_over:
        if lost:
            return lost[0]._replace(holder=holder, until=until)
        if first < progress.total:
            return Claim(first, first + _size(progress.total - first, gateways), holder, until)
    if any(not claim.is_done and claim.until > now for claim in claims):
        return None
    return Claim(progress.total, progress.total, holder, until)


def _claimed(claims: Sequence[Claim]) -> int:
    return claims[-1].end if claims else 0


def _size(left: int, gateways: int) -> int:
    if not gateways:
        return left
    share = left // (2 * gateways)
    return min(left, max(_LEAST_LINES, min(share, _MOST_LINES)))
