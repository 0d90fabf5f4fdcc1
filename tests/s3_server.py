"""A server with the API of S3 for tests: nanio, which keeps objects as files below a temporary folder.

Tests are skipped where it or the client is not installed.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from loadtest.servers.processes import free_ports
from loadtest.servers.server import wait_until

KEY_ID, SECRET = "AKIAGATEWAYTESTS", "not-a-secret"
_WAIT_SECONDS = 30.0
_NAMES = count()


class S3Server:
    """One server with one bucket, which can be stopped, started again and frozen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        [self.port] = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "objects" / "bucket").mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def new_place(self) -> str:
        """A prefix in the bucket where nothing is."""
        return f"s3://bucket/test/{next(_NAMES)}"

    def objects(self, place: str) -> list[str]:
        """The paths of all objects of a place."""
        top = self._folder / "objects" / place.removeprefix("s3://")
        return sorted(path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file())

    def start(self) -> None:
        options = ["--data-dir", str(self._folder / "objects"), "--host", "127.0.0.1", "--port", str(self.port)]
        keys = {"NANIO_ACCESS_KEY": KEY_ID, "NANIO_SECRET_KEY": SECRET}
        command = [sys.executable, "-m", "nanio", "serve", *options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | keys)
        wait_until(self._listens, self._process.poll, _WAIT_SECONDS)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Connections are accepted, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server until the end of the block."""
    for needed in ("obstore", "nanio"):
        pytest.importorskip(needed)
    with tempfile.TemporaryDirectory(prefix="s3-", ignore_cleanup_errors=True) as folder:
        server = S3Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
