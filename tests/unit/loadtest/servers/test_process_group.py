"""A group of processes ends as a whole."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from loadtest.servers.processes import ProcessGroup

_DEADLINE_SECONDS = 20.0


def started(script: str, log: Path) -> ProcessGroup:
    """Once it has said a word."""
    group = ProcessGroup(["sh", "-c", script], dict(os.environ), log)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return group


def is_there(pid: int) -> bool:
    """Whether the process lives; one that was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_leader_that_heeds_the_request_is_not_killed(tmp_path: Path) -> None:
    group = started("trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done", tmp_path / "log")
    assert group.exit_code() is None
    assert group.stop(_DEADLINE_SECONDS)
    assert group.exit_code() == 7


def test_a_leader_that_does_not_is_killed_after_the_grace(tmp_path: Path) -> None:
    group = started("trap '' TERM; echo ready; while :; do sleep 0.05; done", tmp_path / "log")
    assert not group.stop(0.1)
    assert group.exit_code() == -9


def test_workers_do_not_outlive_their_leader(tmp_path: Path) -> None:
    log = tmp_path / "log"
    group = started("sleep 300 & echo $!; exit 0", log)
    worker = int(log.read_text())
    assert group.stop(_DEADLINE_SECONDS)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while is_there(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_that_is_not_there_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ProcessGroup(["no-such-program"], {}, tmp_path / "log")


def test_a_group_that_is_killed_is_gone_with_its_workers_and_stopping_it_is_harmless(tmp_path: Path) -> None:
    log = tmp_path / "log"
    group = started("sleep 300 & echo $!; wait", log)
    worker = int(log.read_text())
    group.kill()
    assert group.exit_code() == -9
    assert group.stop(_DEADLINE_SECONDS)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while is_there(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)
