"""The real gateway, `python -m gateway serve`, as a process that can be watched from outside."""

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from loadtest.servers.processes import Guard, free_ports, launch, stop
from loadtest.servers.server import Server, gateway_server, get, serves

_STANDARD_ERROR = 2
_ASKED_SECONDS = 5.0
_STOP_SECONDS = 3.0
_SMALL_PIPE_BYTES = 4096
_PROC = Path("/proc")


class GatewayProcess:
    """A running gateway: its ports, and what the kernel and its metrics tell of it."""

    def __init__(self, server: Server, port: int, admin_port: int) -> None:
        self.server, self.port, self.admin_port = server, port, admin_port

    @property
    def pid(self) -> int:
        return self.server.pid

    @property
    def file(self) -> Path:
        """Its configuration."""
        return self.server.log.with_suffix(".yaml")

    @property
    def has_ended(self) -> bool:
        return not self.server.is_running()

    @property
    def rss_bytes(self) -> int:
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
        return len(list((_PROC / str(self.pid) / "fd").iterdir()))

    @property
    def threads(self) -> int:
        return len(list((_PROC / str(self.pid) / "task").iterdir()))

    def metrics(self) -> dict[str, float]:
        """/metrics: each series with its labels, and its value."""
        return read_metrics(get(f"http://127.0.0.1:{self.admin_port}/metrics").decode())

    def wait_until_up(self, backends: int) -> None:
        """Wait until so many backends are up, and for what is asked of them then."""
        up = "gateway_backend_up{"
        self.server.wait_until(
            lambda: sum(value for name, value in self.metrics().items() if name.startswith(up)) >= backends
        )
        time.sleep(_ASKED_SECONDS)

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
    ports = free_ports(2)
    how: dict[str, Any] = {"ready_path": "/livez", "stop_seconds": _STOP_SECONDS, "apart": True}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        log = Path(folder) / "gateway.log"
        log.with_suffix(".out").symlink_to(os.devnull)  # the access log of a long run would fill the disk
        if not reads_log:
            stack.enter_context(_unread_pipe(log))
        server = gateway_server(sections, log, module=module, ports=ports, **how)
        port, admin_port = ports
        yield GatewayProcess(stack.enter_context(server), port, admin_port)


@contextmanager
def _unread_pipe(path: Path) -> Iterator[None]:
    """A small one, open for reading as long as the block runs."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _SMALL_PIPE_BYTES)
        yield
    finally:
        os.close(pipe)


@contextmanager
def engine_process(*flags: str) -> Iterator[int]:
    """A mock engine in a process of its own; gives its port."""
    command = [sys.executable, "-m", "tests.bench.mock_engine", *flags]
    process = launch(command, None, subprocess.PIPE, _STANDARD_ERROR)
    guard = Guard(process.pid)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        stop(process)
        guard.dismiss()


def wait_until_ready(gateway: GatewayProcess) -> None:
    """Wait until /readyz is 200. Raises ServerFailed."""
    gateway.server.wait_until(lambda: serves(f"{gateway.server.url}/readyz"))
