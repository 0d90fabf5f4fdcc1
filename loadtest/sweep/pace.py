"""How long the rest of a sweep will take, by how long its starts and runs took so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Work:
    """Servers to start, and the shares of whole runs to make, added up."""

    starts: float
    shares: float

    def __add__(self, other: Work) -> Work:
        return Work(self.starts + other.starts, self.shares + other.shares)


@dataclass(slots=True)
class Pace:
    """Learns from each start and each run."""

    _starts: list[float] = field(default_factory=list)
    _run_seconds: float = 0.0
    _shares: float = 0.0

    def started(self, seconds: float) -> None:
        """A server took so long, stopping it included or not."""
        self._starts.append(seconds)

    def ran(self, seconds: float, share: float) -> None:
        """A run of that share of a whole one took so long."""
        self._run_seconds += seconds
        self._shares += share

    def seconds_left(self, work: Work) -> float | None:
        """None as long as nothing is known."""
        if not self._starts or (work.shares and not self._shares):
            return None
        runs = work.shares * self._run_seconds / self._shares if work.shares else 0.0
        return work.starts * sum(self._starts) / len(self._starts) + runs


def told_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
