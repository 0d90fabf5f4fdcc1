"""What a worker process and its parent say to each other over their pipe."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from loadtest.drive.health import WorkerHealth
from loadtest.drive.record import Record


@dataclass(frozen=True, slots=True)
class Start:
    """Parent to worker: begin; `origin` is the run's zero on the machine's monotonic clock."""

    origin: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent to worker: end now, give up what is in flight, and report."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker to parent: warmed up, waiting for the start."""

    warmup: list[Record]


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker to parent: the requests that ended since the last one."""

    worker: int
    records: list[Record]
    in_flight: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Worker to parent: nothing follows. `failure`: the error that ended it before its time, if any."""

    health: WorkerHealth
    itl_ticks: Counter[int] = field(default_factory=Counter)
    failure: str = ""


FromWorker = Ready | Progress | Finished
ToWorker = Start | Stop
