"""A real Redis or Valkey for one test: on a port of its own, with its files in a temporary folder.

Tests are skipped where neither is installed. `any_store` also gives the store that the parent of workers serves.
"""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from loadtest.servers.processes import free_ports

_START_SECONDS = 20.0
_PATH = "/usr/local/bin:/usr/bin:/usr/sbin"


def server_program() -> str:
    """Where the program is; skips the test if it is not installed."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name, path=_PATH):
            return found
    pytest.skip("neither valkey-server nor redis-server is installed")


class RedisServer:
    """One server, which can be killed, paused and started again. Without `keeps`, it always starts empty."""

    def __init__(self, folder: Path, *, keeps: bool = False, options: tuple[str, ...] = ()) -> None:
        self._program = server_program()
        self._folder = folder
        self._options = (*(("--appendonly", "yes") if keeps else ()), *options)
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [self._program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--save", "", "--daemonize", "no", *self._options]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < until, "it does not answer"
            time.sleep(0.02)

    def _answers(self) -> bool:
        return self.ask("PING") == "+PONG"

    def ask(self, command: str | bytes) -> str:
        """The first line of the answer to a command, as a line or packed; empty = there was none."""
        data = command if isinstance(command, bytes) else command.encode() + b"\r\n"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
            connection.settimeout(1.0)
            connection.sendall(data)
            return connection.recv(4096).decode(errors="replace").splitlines()[0]
        return ""

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """End it at once; what it does not keep is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(folder: Path, *, keeps: bool = False, options: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    """A server that runs while the block does."""
    server = RedisServer(folder, keeps=keeps, options=options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def sentinel(folder: Path, primary: RedisServer, name: str) -> Iterator[int]:
    """A Sentinel that knows this primary by a name, and decides alone to replace it; yields its port."""
    (port,) = free_ports(1)
    file = folder / "sentinel.conf"
    file.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {name} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 3000\n"
    )
    with (folder / "sentinel.log").open("ab") as log:
        process = subprocess.Popen([server_program(), str(file), "--sentinel"], stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def any_store(kind: str, folder: Path) -> AsyncIterator[str]:
    """The URL of a store that runs while the block does. `kind`: redis, or that of the parent of several workers."""
    if kind == "redis":
        with redis_server(folder) as server:
            yield server.url
        return
    from gateway.features.coordination.local_server import TableServer

    with TemporaryDirectory(prefix="store-") as short:  # the path of a socket has 107 bytes at most
        async with TableServer("run").serving(f"{short}/store"):
            yield f"unix://{short}/store"
