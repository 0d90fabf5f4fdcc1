"""A process group that outlives neither its owner's block nor its owner's process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Waits for the end of its input, which comes when its parent ends in whatever way, then kills the process group.
_GUARD = ("/bin/sh", "-c", "cat > /dev/null; kill -s KILL -- -$1 2> /dev/null", "guard")


class ProcessGroup:
    """Starts when made, its output going to a file; stop() ends all of it. Raises OSError where it cannot start."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._leader = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        guard = [*_GUARD, str(self.pid)]
        try:
            self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        except BaseException:
            self._kill()
            self._leader.wait()
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
        os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace_seconds: float) -> bool:
        """Terminate the leader, then kill whatever of the group is left. Whether the grace was enough."""
        in_time = True
        if self.exit_code() is None:
            self.terminate()
        try:
            self._leader.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            self._kill()
            self._leader.wait()
            self._dismiss_guard()
        return in_time

    def is_left(self) -> bool:
        """Whether any process of the group is, be it one that nobody has waited for."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _kill(self) -> None:
        # The leader keeps the group's id from being reused until it is waited for; workers may outlive it.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _dismiss_guard(self) -> None:
        # Before its input ends: the group's id may belong to somebody else by now.
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
