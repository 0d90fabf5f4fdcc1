"""Shares that wait, by when their next request starts. A look costs as much as it takes of them, not as many wait."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class ServedShare(Protocol):
    """A share: what it was given ends at virtual time `end`."""

    end: float
    weight: float


class FairTurns(Generic[T]):
    """Shares in the order of start-time fair queueing: a share starts where it ends, but lags `most_apart_tokens` by
    weight behind virtual time at most.

    One that lags so far starts at a fixed distance from virtual time: it is kept in a list of its own, by that
    distance. Shares get into it when a look finds them, and leave it when they are moved.
    """

    def __init__(self, most_apart_tokens: float) -> None:
        self._most_apart_tokens = most_apart_tokens
        self._by_end: list[tuple[float, int, ServedShare, T]] = []
        self._lagging: list[tuple[float, int, ServedShare, T]] = []  # by distance, which is below zero
        self._entries: dict[ServedShare, tuple[float, int, ServedShare, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, share: ServedShare) -> bool:
        return share in self._entries

    def join(self, share: ServedShare, number: int, what: T) -> None:
        """A share begins to wait; the number is its own."""
        entry = self._entries[share] = share.end, number, share, what
        insort(self._by_end, entry)

    def leave(self, share: ServedShare) -> None:
        """It does not wait any more."""
        entry = self._entries.pop(share)
        for entries in (self._by_end, self._lagging):
            place = bisect_left(entries, entry)
            if place < len(entries) and entries[place] is entry:
                del entries[place]

    def moved(self, share: ServedShare) -> None:
        """Its end or weight has changed."""
        _, number, _, what = self._entries[share]
        self.leave(share)
        self.join(share, number, what)

    def after(self, now: float) -> Iterator[tuple[float, int, float, T]]:
        """Start, number and weight of each share at virtual time `now`, by start and then number, with what it is.

        Shares must not change until the last is had.
        """
        by_end, lagging = self._by_end, self._lagging
        at = behind = 0
        while True:
            while at < len(by_end) and by_end[at][0] <= now - self._most_apart_tokens / by_end[at][2].weight:
                _, number, share, what = by_end.pop(at)
                entry = self._entries[share] = -self._most_apart_tokens / share.weight, number, share, what
                insort(lagging, entry)
            lags = behind < len(lagging)
            if lags:
                distance, number, share, what = lagging[behind]
                start = now + distance
                if at < len(by_end) and by_end[at][:2] < (start, number):
                    lags = False
            if lags:
                behind += 1
            elif at < len(by_end):
                start, number, share, what = by_end[at]
                at += 1
            else:
                return
            yield start, number, share.weight, what
