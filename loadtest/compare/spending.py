"""What a proxy's processes spend in a run, and what others took of the machine meanwhile."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Self

from loadtest.servers.procs import CpuTimes, core_busy_seconds, cpu_seconds_between, cpu_times, memory_mib


class Spending:
    """Counts inside the block. With `all_are_ours`, every process of the comparison descends from this one."""

    def __init__(self, pid: int | None, *, all_are_ours: bool = False) -> None:
        self._pid = pid
        self._all_are_ours = all_are_ours
        self._before: CpuTimes = {}
        self._ours_before: CpuTimes = {}
        self._busy_before = self._began = 0.0
        self.cpu_seconds: float | None = None
        self.memory_mib: float | None = None
        """At the end; pages that are shared count once (Pss)."""
        self.others_share: float | None = None
        """Of all cores' time."""

    def __enter__(self) -> Self:
        if self._all_are_ours:
            self._began, self._busy_before = time.monotonic(), _busy_seconds()
            self._ours_before = cpu_times(os.getpid())
        if self._pid is not None:
            self._before = cpu_times(self._pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid is not None:
            self.cpu_seconds = cpu_seconds_between(self._before, cpu_times(self._pid))
            self.memory_mib = memory_mib(self._pid)
        if self._all_are_ours:
            ours = cpu_seconds_between(self._ours_before, cpu_times(os.getpid()))
            seconds = (time.monotonic() - self._began) * len(os.sched_getaffinity(0))
            self.others_share = others_share(_busy_seconds() - self._busy_before, ours, seconds)


def others_share(busy_seconds: float, ours_seconds: float, core_seconds: float) -> float:
    """What is busy beside us, of all the time that cores had."""
    return max(0.0, busy_seconds - ours_seconds) / max(core_seconds, 1e-9)


def _busy_seconds() -> float:
    return sum(core_busy_seconds(core) for core in os.sched_getaffinity(0))
