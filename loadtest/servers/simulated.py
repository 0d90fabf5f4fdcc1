"""One simulated engine, as a process that outlives neither its owner's block nor its owner's process."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.servers.process_group import ProcessGroup
from loadtest.servers.procs import STOP_GRACE_SECONDS
from loadtest.servers.serving import NotServing, wait_until_serving

_READY_SECONDS = 30.0
_LOG_TAIL_LINES = 30


class SimulatedProcess:
    """One `loadtest sim` with these flags, at a port of 127.0.0.1."""

    def __init__(self, flags: Sequence[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [sys.executable, "-m", "loadtest", "sim", "--port", str(port), *flags]
        self._group: ProcessGroup | None = None

    @property
    def pid(self) -> int:
        return self._started().pid

    def start(self) -> None:
        """Start it, again after it was stopped or killed; returns at once."""
        self._group = ProcessGroup(self._command, dict(os.environ), self._log)

    def wait_ready(self) -> None:
        """Return once it serves. Raises NotServing."""
        group = self._started()
        try:
            wait_until_serving(f"{self.url}/health", group.exit_code, _READY_SECONDS)
        except NotServing as failed:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
            raise NotServing(f"the simulated engine at {self.url} {failed}; its log ends with:\n{tail}") from None

    def stop(self) -> None:
        """Stop it; harmless when it never started."""
        if self._group is not None:
            self._group.stop(STOP_GRACE_SECONDS)

    def kill(self) -> None:
        """Kill it, as a crash would."""
        self._started().kill()

    def suspend(self) -> None:
        """Let it hang: its connections stay open, and nothing is answered."""
        self._started().suspend()

    def resume(self) -> None:
        """Let it go on from where it hung."""
        self._started().resume()

    def _started(self) -> ProcessGroup:
        if self._group is None:
            raise NotServing(f"the simulated engine at {self.url} was not started")
        return self._group
