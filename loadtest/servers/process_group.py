"""A process group that outlives neither its owner's block nor its owner's process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.servers.guard import Guard
from loadtest.servers.procs import launch, signal_group, stop


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
        """Whether any process of the group is, be it one that nobody has waited for."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _end(self) -> None:
        # From now on the group's id may be somebody else's.
        self._is_over = True
        self._guard.dismiss()
