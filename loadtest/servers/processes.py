"""Processes on cores of their own: start, CPU time and memory, and stop with all children.

A guard ends a process group when its owner's process ends in any way, SIGKILL included.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import IO

# Waits for the end of its input, which comes when its parent ends in whatever way, then kills the process group.
_COMMAND = ("/bin/sh", "-c", "cat > /dev/null; kill -s KILL -- -$1 2> /dev/null", "guard")


class Guard:
    """Watches from when it is made until it is dismissed. Raises OSError where it cannot start."""

    def __init__(self, group: int) -> None:
        self._process = subprocess.Popen([*_COMMAND, str(group)], stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        """End the watch; harmless when it has ended."""
        # Before its input ends: the group's id may belong to another group by now.
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


STOP_GRACE_SECONDS = 6.0
CHOSEN_PORTS = range(20_000, 32_000)
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free a moment ago.

    Not of the range that outgoing connections use: such a port may be taken before a slow starter binds it.
    """
    ports: list[int] = []
    choice, random = _chosen_ports(), SystemRandom()
    with ExitStack() as held:
        while len(ports) < count:
            candidate = random.choice(choice)
            try:
                held.enter_context(socket.socket()).bind(("", candidate))
            except OSError:
                continue
            ports.append(candidate)
    return ports


def _chosen_ports() -> Sequence[int]:
    """Ports to choose from: those of LOADTEST_PORTS (such as 20000-23999), for processes that run side by side."""
    first, _, last = os.environ.get("LOADTEST_PORTS", "").partition("-")
    return range(int(first), int(last) + 1) if first and last else CHOSEN_PORTS


@contextmanager
def bound_to(cores: Collection[int]) -> Iterator[None]:
    """This thread, and so what it starts meanwhile, on those cores; none = where it may run anyway."""
    if not cores:
        yield
        return
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def launch(
    command: Sequence[str],
    core: int | None,
    out: int | IO[bytes] | None,
    error: int | IO[bytes] | None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start COMMAND on a core, or on any, in a process group of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with bound_to(() if core is None else {core}):
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            env={**inherited, **(environment or {})},
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes], grace_seconds: float = STOP_GRACE_SECONDS) -> bool:
    """Ask the process to end, then kill what is left of its group. Whether it ended in time."""
    # Not the whole group: an API server that ends its engines itself takes a signal to them for a crash.
    process.terminate()
    in_time = True
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        signal_group(process, signal.SIGKILL)
        process.wait()
    return in_time


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal whatever is left of a process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def parent_of(stat: str) -> int:
    """The parent in the text of /proc/PID/stat, whose second field may hold spaces and parentheses."""
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                parent = parent_of((entry / "stat").read_text())
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found.extend(children.get(process, []))
    return found


CpuTimes = dict[tuple[int, int], int]
"""Nanoseconds of CPU by (process, thread)."""


def cpu_times(root: int) -> CpuTimes:
    """The CPU time of every thread of a process tree."""
    times: CpuTimes = {}
    for process in tree(root):
        try:
            threads = [entry.name for entry in (_PROC / str(process) / "task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            try:
                times[process, int(thread)] = _thread_ns(_PROC / str(process) / "task" / thread)
            except OSError:
                continue
    return times


def _thread_ns(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except FileNotFoundError:  # a kernel without it: clock ticks have to do
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // _TICKS_PER_SECOND


def cpu_seconds_between(before: CpuTimes, after: CpuTimes) -> float:
    """CPU spent by the threads that are there at the end."""
    return sum(now - before.get(thread, 0) for thread, now in after.items()) / 1e9


def memory_mib(root: int) -> float:
    """The memory of a process tree, shared pages counted once (Pss)."""
    total_kib = 0
    for process in tree(root):
        try:
            rollup = (_PROC / str(process) / "smaps_rollup").read_text()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total_kib / 1024


def core_busy_seconds(core: int, stat: str | None = None) -> float:
    """Seconds since boot in which a core did anything, for other guests of the machine, too.

    From /proc/stat, whose fields are user, nice, system, idle, iowait, irq, softirq, steal, in clock ticks.
    """
    for line in (stat or (_PROC / "stat").read_text()).splitlines():
        name, *fields = line.split()
        if name == f"cpu{core}":
            ticks = [int(field) for field in fields[:8]]
            return (sum(ticks) - ticks[3] - ticks[4]) / _TICKS_PER_SECOND
    raise ValueError(f"/proc/stat has no cpu{core}")
