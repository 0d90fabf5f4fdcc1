"""The real gateway, `python -m gateway serve`, as a process that can be watched from outside."""

import fcntl
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from loadtest.servers.processes import NotServing, guarded, launch, stop, wait_until_serving

_START_SECONDS = 30.0
_STANDARD_ERROR = 2
_SMALL_PIPE_BYTES = 4096
_PROC = Path("/proc")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class GatewayFailed(Exception):
    """The gateway did not start, or has ended; the message says what it printed."""


class GatewayProcess:
    """A running gateway: its ports, and what the kernel and its metrics tell of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, admin_port: int) -> None:
        self.process, self.port, self.admin_port = process, port, admin_port

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        """It exited or was killed."""
        return self.process.poll() is not None

    @property
    def rss_bytes(self) -> int:
        """Resident memory now."""
        return self._status("VmRSS")

    @property
    def peak_rss_bytes(self) -> int:
        """The most resident memory since the start or the last `reset_peak`."""
        return self._status("VmHWM")

    def reset_peak(self) -> None:
        """Begin a new peak of the resident memory."""
        (_PROC / str(self.pid) / "clear_refs").write_text("5")

    @property
    def open_files(self) -> int:
        """Descriptors."""
        return len(list((_PROC / str(self.pid) / "fd").iterdir()))

    @property
    def threads(self) -> int:
        """Threads."""
        return len(list((_PROC / str(self.pid) / "task").iterdir()))

    def metrics(self) -> dict[str, float]:
        """/metrics: each series with its labels, and its value."""
        with _direct.open(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=30) as answer:
            return read_metrics(answer.read().decode())

    def _status(self, name: str) -> int:
        with suppress(OSError):
            for line in (_PROC / str(self.pid) / "status").read_text().splitlines():
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
        return 0


def read_metrics(page: str) -> dict[str, float]:
    """The samples of a page in the exposition format, by their text before the value."""
    lines = (line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@contextmanager
def serving(sections: dict[str, Any], *, reads_log: bool = True, module: str = "gateway") -> Iterator[GatewayProcess]:
    """A gateway with this configuration while the block runs. Without `reads_log` its log is a full pipe soon.

    `module` is the command: `gateway`, or that of `tests/recounted_gateway.py`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gateway.yaml"
        server = {"host": "127.0.0.1", "port": 0, "admin": {"port": 0}, "drain_delay_seconds": 0}
        file.write_text(yaml.safe_dump({**sections, "server": {**server, **sections.get("server", {})}}))
        command = [sys.executable, "-m", module, "serve", "-c", str(file)]
        process = launch(command, None, subprocess.DEVNULL, subprocess.PIPE)
        with guarded(process):
            assert process.stderr is not None
            try:
                if not reads_log:
                    fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, _SMALL_PIPE_BYTES)
                log = _Log(process.stderr, reads_on=reads_log)
                port, admin_port = log.ports()
                yield GatewayProcess(process, port, admin_port)
            finally:
                stop(process, grace_seconds=3.0)
                process.stderr.close()


class _Log:
    """Reads standard error in a thread until the ports are known, and then on, if it shall."""

    def __init__(self, pipe: IO[bytes], *, reads_on: bool) -> None:
        self._pipe, self._reads_on = pipe, reads_on
        self._lines: list[bytes] = []
        self._found: dict[str, Any] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(ValueError, OSError):
            while line := self._pipe.readline():
                if self._found is None:
                    self._look_at(line)
                if self._found is not None and not self._reads_on:
                    return
        self._done.set()

    def _look_at(self, line: bytes) -> None:
        self._lines.append(line)
        if b'"event": "serving"' in line:
            self._found = json.loads(line)
            self._done.set()

    def ports(self) -> tuple[int, int]:
        """The main and the admin port, once it serves. Raises GatewayFailed."""
        self._done.wait(_START_SECONDS)
        if self._found is None:
            raise GatewayFailed(b"".join(self._lines[-5:]).decode() or f"no port within {_START_SECONDS:g} s")
        return self._found["port"], self._found["admin_port"]


@contextmanager
def engine_process(*flags: str) -> Iterator[int]:
    """A mock engine in a process of its own; gives its port."""
    process = launch([sys.executable, "-m", "tests.bench.mock_engine", *flags], None, subprocess.PIPE, _STANDARD_ERROR)
    with guarded(process):
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            stop(process)


def wait_until_ready(gateway: GatewayProcess, deadline_seconds: float = 20.0) -> None:
    """Wait until /readyz is 200. Raises GatewayFailed."""
    try:
        wait_until_serving(f"http://127.0.0.1:{gateway.port}/readyz", gateway.process.poll, deadline_seconds)
    except NotServing as failed:
        raise GatewayFailed(f"the gateway {failed}") from failed
