"""Processes are measured with their children and stopped with them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from loadtest.servers import processes

CORE = min(os.sched_getaffinity(0))
FORKS = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
IGNORES_SIGTERM = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.write(1, b'ready\\n'); time.sleep(60)"


@contextmanager
def python(code: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A Python program with its standard output; stopped at the end, whatever happens."""
    process = processes.launch([sys.executable, "-c", code], CORE, subprocess.PIPE, subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout as printed:
        try:
            yield process, printed
        finally:
            processes.stop(process)


def test_a_process_runs_on_its_core_and_stops_with_its_children() -> None:
    with python(FORKS) as (process, printed):
        pids = {int(printed.readline()) for _ in range(2)}
        assert set(processes.tree(process.pid)) == pids
        assert all(os.sched_getaffinity(pid) == {CORE} for pid in pids)
        assert processes.memory_mib(process.pid) > 1
        processes.stop(process)
        assert printed.read() == b""  # ends when the last writer has gone
    assert process.returncode == -15


def test_one_that_ignores_sigterm_is_killed() -> None:
    with python(IGNORES_SIGTERM) as (process, printed):
        printed.readline()
        assert not processes.stop(process, grace_seconds=0.2)
    assert process.returncode == -9


def test_proxy_settings_of_the_environment_do_not_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid")
    show = "import os; print(os.environ.get('HTTP_PROXY'), os.environ['MARK'])"
    process = processes.launch(
        [sys.executable, "-c", show], CORE, subprocess.PIPE, subprocess.DEVNULL, environment={"MARK": "here"}
    )
    out, _ = process.communicate(timeout=20)
    assert out.split() == [b"None", b"here"]


def test_cpu_time_grows_with_work() -> None:
    before = processes.cpu_times(os.getpid())
    spins_until = time.process_time() + 0.05
    while time.process_time() < spins_until:
        pass
    assert processes.cpu_seconds_between(before, processes.cpu_times(os.getpid())) >= 0.04


def test_threads_that_are_new_count_whole_and_ones_that_ended_do_not_subtract() -> None:
    before = {(1, 1): 5_000_000_000, (1, 2): 9_000_000_000}
    after = {(1, 1): 6_000_000_000, (1, 3): 2_000_000_000}
    assert processes.cpu_seconds_between(before, after) == 3.0


def test_the_parent_is_found_behind_a_name_with_spaces_and_parentheses() -> None:
    assert processes.parent_of("42 (a) b (c)) S 17 42 42 0") == 17


def test_a_cores_busy_time_leaves_out_idle_and_waiting() -> None:
    stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 10 50 9000 800 5 15 20 7 7\ncpu10 1 0 0 0 0 0 0 0 0 0\n"
    assert processes.core_busy_seconds(0, stat) == 200 / os.sysconf("SC_CLK_TCK")
    with pytest.raises(ValueError, match="no cpu1"):
        processes.core_busy_seconds(1, stat)


def test_chosen_ports_cannot_be_taken_by_outgoing_connections() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first_ephemeral for port in processes.free_ports(50))


def test_ports_are_of_the_range_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADTEST_PORTS", "20000-20009")
    assert all(20000 <= port <= 20009 for port in processes.free_ports(3))


def test_a_port_that_is_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOADTEST_PORTS", raising=False)
    [port] = processes.free_ports(1)
    other = port + 1 if port + 1 in processes.CHOSEN_PORTS else port - 1
    monkeypatch.setattr(processes, "CHOSEN_PORTS", (port, other))
    with socket.socket() as held:
        held.bind(("", port))
        assert processes.free_ports(1) == [other]
