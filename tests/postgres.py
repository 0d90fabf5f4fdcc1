"""A PostgreSQL server of a test's own, in a temporary folder with its own port; and databases on it.

Tests are skipped where PostgreSQL or its client is not installed.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from loadtest.servers.processes import free_ports

_NAMES = count()
_WAIT_SECONDS = "30"


def _program(name: str) -> str:
    """Where the program is; skips the test if it is not installed."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    found = shutil.which(
        name, path=os.pathsep.join([*map(str, versions), os.environ.get("PATH", ""), "/usr/local/bin"])
    )
    if found is None:
        pytest.skip("PostgreSQL is not installed")
    return found


class PostgresServer:
    """A server that runs, as a user who is not root."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self._folder = folder
        self._user = user
        [self.port] = free_ports(1)

    def _run(self, program: str, *options: str) -> None:
        command = [_program(program), *options]
        done = subprocess.run(
            command, user=self._user, cwd=self._folder, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert not done.returncode, (command, done.stdout, done.stderr)

    def prepare(self) -> None:
        self._run("initdb", "-D", str(self._folder / "data"), "-A", "trust", "-U", "gateway", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder} -c fsync=off"
        log = str(self._folder / "log")
        self._run(
            "pg_ctl", "-D", str(self._folder / "data"), "-l", log, "-w", "-t", _WAIT_SECONDS, "-o", options, "start"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-w", "-t", _WAIT_SECONDS, "-m", "immediate", "stop")

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{next(_NAMES)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "gateway", name)
        return f"postgresql://gateway:secret@127.0.0.1:{self.port}/{name}"


def _other_user() -> str | None:
    """A user that may run the server; None = the one that runs the tests."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("PostgreSQL does not run as root, and there is no other user")


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server until the end of the block."""
    pytest.importorskip("psycopg_pool")
    _program("initdb")
    user = _other_user()
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(Path(folder), user)
        server.prepare()
        server.start()
        try:
            yield server
        finally:
            server.stop()
