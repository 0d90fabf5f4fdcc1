"""Processes on cores of their own: start, wait until serving, CPU time and memory, and stop with all children.

A guard ends a process group when its owner's process ends in any way, SIGKILL included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
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
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


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
    out: int | IO[bytes],
    error: int | IO[bytes],
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


@contextmanager
def running(
    command: Sequence[str], core: int | None, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server on a core, or on any, stopped at the end, and killed if we are.

    It prints errors to LOG, the rest beside it with the suffix .out.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    printed = log.with_suffix(".out")
    with printed.open("wb") as out, log.open("wb") as error:
        process = launch(command, core, out, error, environment)
        try:
            with guarded(process):
                yield process
        finally:
            stop(process)
            _keep_end(printed)


@contextmanager
def guarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Its group is killed if we end inside the block without leaving it."""
    guard = Guard(process.pid)
    try:
        yield
    finally:
        guard.dismiss()


def _keep_end(path: Path, size: int = 65536) -> None:
    """An access log of millions of lines is written for its cost, not to be kept."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        end = file.read()
    path.write_bytes(end)


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


class ProcessGroup:
    """Starts when made, its output going to a file; stop() ends all of it. Raises OSError where it cannot start."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._leader = launch(command, None, log, subprocess.STDOUT, environment)
        self._is_over = False
        try:
            self._guard = Guard(self.pid)
        except BaseException:
            stop(self._leader, grace_seconds=0.0)
            raise

    @property
    def pid(self) -> int:
        """The leader's, which is the group's id too."""
        return self._leader.pid

    def exit_code(self) -> int | None:
        """The leader's; None while it runs."""
        return self._leader.poll()

    def terminate(self) -> None:
        """Ask the leader to stop; returns at once."""
        self._leader.terminate()

    def stop(self, grace_seconds: float) -> bool:
        """Terminate the leader, then kill whatever of the group is left. Whether the grace was enough."""
        if self._is_over:
            return True
        try:
            return stop(self._leader, grace_seconds)
        finally:
            self._end()

    def kill(self) -> None:
        """Kill all of it, as a crash would; returns once the leader is gone."""
        if not self._is_over:
            signal_group(self._leader, signal.SIGKILL)
            self._leader.wait()
            self._end()

    def suspend(self) -> None:
        """Let nothing of it run: its connections stay open, and nothing is answered."""
        if not self._is_over:
            signal_group(self._leader, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again from where it was."""
        if not self._is_over:
            signal_group(self._leader, signal.SIGCONT)

    def is_left(self) -> bool:
        """Whether any process of the group is, be it one that was not waited for."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _end(self) -> None:
        # From now on the group's id may be reused.
        self._is_over = True
        self._guard.dismiss()


_POLL_SECONDS = 0.1


class NotServing(Exception):
    """A server ended before it served, or takes too long; the message says which."""


def serves(url: str, timeout_seconds: float = 5.0) -> bool:
    """Whether a GET, by no proxy, is answered with 200."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_seconds) as answer:
            return int(answer.status) == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def wait_until_serving(
    url: str,
    exit_code: Callable[[], int | None],
    deadline_seconds: float,
    on_poll: Callable[[float], None] = lambda _elapsed_seconds: None,
) -> float:
    """Seconds until the server whose exit code that is serves. Raises NotServing, and what ON_POLL raises."""
    started = time.monotonic()
    while not serves(url):
        elapsed = time.monotonic() - started
        if (code := exit_code()) is not None:
            raise NotServing(f"ended by itself, exit code {code}")
        if elapsed > deadline_seconds:
            raise NotServing(f"is not ready after {deadline_seconds:g} s")
        on_poll(elapsed)
        time.sleep(_POLL_SECONDS)
    # Whoever answers may be another, if this one could not have the port.
    if (code := exit_code()) is not None:
        raise NotServing(f"ended by itself, exit code {code}")
    return time.monotonic() - started
