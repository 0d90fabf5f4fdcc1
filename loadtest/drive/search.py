"""Searches for the highest load that keeps the SLO: doubling, bisection, confirmation. Pure.

A run near the limit passes or fails by chance, so a load counts by all its runs, and the answer has passed twice.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum


class Aim(StrEnum):
    """The goal of `--find`."""

    RATE = "max-rate"
    CONCURRENCY = "max-concurrency"


_FIRST = {Aim.RATE: 2.0, Aim.CONCURRENCY: 8.0}
_LEAST = {Aim.RATE: 0.05, Aim.CONCURRENCY: 1.0}
_MOST = {Aim.RATE: 100_000.0, Aim.CONCURRENCY: 100_000.0}
_GROWTH = 2.0
_PRECISION = 0.05
_CONFIRMATIONS = 2
_STEP_DOWN = 0.9
_SPOILT = 2
_DISTURBANCES = 3
_HOPELESS = 3  # loads


@dataclass(slots=True)
class LoadSearch:
    """Asks for one load after the other until it is over; `take` says whether a run at that load passed."""

    aim: Aim
    _: KW_ONLY
    most_runs: int = 40
    _passes: dict[float, int] = field(default_factory=dict)
    _fails: dict[float, int] = field(default_factory=dict)
    _spoilt: dict[float, int] = field(default_factory=dict)
    _carried: float = 0.0  # by the client, whether the target kept the SLO or not
    disturbances: int = 0

    @property
    def runs(self) -> int:
        return sum(self._passes.values()) + sum(self._fails.values())

    def next(self) -> float | None:
        """The load of the next run; None where the search is over."""
        if self.runs >= self.most_runs or self.is_disturbed or self._is_hopeless:
            return None
        low, high = self.highest_passing, self._lowest_failing()
        if low is None:
            return self._below(high)
        if high is None:
            return None if low >= _MOST[self.aim] and self._is_confirmed(low) else self._above(low)
        between = self._between(low, high)
        if between is not None:
            return between
        return None if self._is_confirmed(low) else low

    def take(self, load: float, *, passed: bool) -> None:
        """Notes how a run at that load ended."""
        counts = self._passes if passed else self._fails
        counts[load] = counts.get(load, 0) + 1
        self._carried = max(self._carried, load)

    def take_spoilt(self, load: float) -> None:
        """Notes a run that the client could not keep up with.

        Two at a load that it has never carried are its limit. At one that it has carried, something else disturbed it.
        """
        if load <= self._carried:
            self.disturbances += 1
            return
        self._spoilt[load] = self._spoilt.get(load, 0) + 1
        if self._spoilt[load] >= _SPOILT:
            self._fails[load] = self._fails.get(load, 0) + 1

    @property
    def is_disturbed(self) -> bool:
        """Whether the client was disturbed so often that the search says nothing more of the target."""
        return self.disturbances >= _DISTURBANCES

    @property
    def _is_hopeless(self) -> bool:
        """Whether the client has carried nothing at several loads: lower ones would not help."""
        return not self._carried and sum(count >= _SPOILT for count in self._spoilt.values()) >= _HOPELESS

    @property
    def answer(self) -> float | None:
        """The highest load that passed at least twice, and more often than it failed; None where there is none."""
        low = self.highest_passing
        return low if low is not None and self._is_confirmed(low) else None

    @property
    def highest_passing(self) -> float | None:
        """The highest load below every one that failed for the most part."""
        bound = self._lowest_failing()
        passing = [load for load in self._passes if self._holds(load) and (bound is None or load < bound)]
        return max(passing, default=None)

    @property
    def limit(self) -> float | None:
        """The lowest load that was too much; None where none was."""
        return self._lowest_failing()

    def _holds(self, load: float) -> bool:
        return self._passes.get(load, 0) > self._fails.get(load, 0)

    def _lowest_failing(self) -> float | None:
        return min((load for load in self._fails if not self._holds(load)), default=None)

    def _is_confirmed(self, load: float) -> bool:
        return self._passes.get(load, 0) >= _CONFIRMATIONS and self._holds(load)

    def _above(self, low: float) -> float:
        return min(low * _GROWTH, _MOST[self.aim])

    def _below(self, high: float | None) -> float | None:
        """The first load, or one below everything that failed."""
        if high is None:
            return _FIRST[self.aim]
        least = _LEAST[self.aim]
        if high <= least:
            return None
        lower = max(least, high / _GROWTH)
        # Right below a load that was confirmed once and failed later, the limit is near.
        if any(load >= high for load in self._passes):
            lower = max(least, high * _STEP_DOWN)
        return self._whole(lower)

    def _between(self, low: float, high: float) -> float | None:
        """A load in the middle by ratio; None where both are as near as wanted."""
        if high / low <= 1 + _PRECISION:
            return None
        middle = self._whole(math.sqrt(low * high))
        if self.aim is Aim.CONCURRENCY:
            middle = max(middle, low + 1)
        return middle if low < middle < high else None

    def _whole(self, load: float) -> float:
        """Users are whole; rates have three digits."""
        if self.aim is Aim.CONCURRENCY:
            return float(max(1, math.floor(load)))
        return float(f"{load:.3g}")
