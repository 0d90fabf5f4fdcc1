"""A gateway in a process of its own that is replaced by others, all of which end with the test."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import yaml

from loadtest.servers.processes import free_ports
from loadtest.servers.server import serves, wait_until
from tests.clients import DEADLINE_SECONDS, Answer, Client, request
from tests.fault.rig import holds
from tests.processes import is_there
from tests.scripted import ScriptedBackend

READY_SECONDS = 30.0
_RESTART_SECONDS = 60.0  # where many tests share the cores
QUICK = {"probe_interval_seconds": 0.2, "slow_start_seconds": 0}


class Restartable:
    """The processes that serve one file, one after the other."""

    def __init__(self, folder: Path, port: int, admin_port: int, environment: dict[str, str]) -> None:
        self.port = port
        self.admin_port = admin_port
        self.file = folder / "gateway.yaml"
        self.log_file = folder / "log"
        self.environment = environment
        self.processes: list[subprocess.Popen[bytes]] = []

    def rewrite(self, **sections: Any) -> None:
        """Change the configuration file."""
        self.file.write_text(yaml.safe_dump({**yaml.safe_load(self.file.read_text()), **sections}))

    def start(self, *, pass_fds: tuple[int, ...] = (), command: tuple[str, ...] = ()) -> "subprocess.Popen[bytes]":
        """Start a process with the file."""
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                [*command, sys.executable, "-m", "gateway", "serve", "-c", str(self.file)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
                env=os.environ | self.environment, pass_fds=pass_fds,
            )  # fmt: skip
        self.processes.append(process)
        return process

    async def ready(self) -> None:
        """Wait until the last process that was started serves, or has ended."""
        url, last = f"http://127.0.0.1:{self.port}/readyz", self.processes[-1]
        await asyncio.to_thread(wait_until, lambda: serves(url), last.poll, READY_SECONDS)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of this event, of all processes."""
        lines = [line for line in self.log_file.read_bytes().splitlines() if line.startswith(b"{")]
        return [line for line in map(orjson.loads, lines) if line.get("event") == name]

    async def asks_admin(
        self, target: str, method: bytes = b"POST", body: bytes = b"", seconds: float = DEADLINE_SECONDS
    ) -> Answer:
        token = b"authorization: Bearer " + self.environment.get("GATEWAY_ADMIN_TOKEN", "").encode()
        async with await Client.connect(self.admin_port) as client:
            await client.send(request(body, token, method=method, target=target.encode()))
            return await client.answer(seconds)

    async def restart(self) -> int:
        """Have it restart; returns the new process."""
        answer = await self.asks_admin("/admin/restart", seconds=_RESTART_SECONDS)
        assert answer.status == 200, answer.body
        return int(answer.json["pid"])

    async def client(self) -> Client:
        return await Client.connect(self.port)

    async def ask(self, body: bytes, *headers: bytes, **options: Any) -> Answer:
        """One request on a connection of its own."""
        async with await self.client() as client:
            await client.send(request(body, *headers, **options))
            return await client.answer()

    async def ended(self, pid: int) -> None:
        """Wait until a process has ended; those that were started here are reaped."""

        def is_gone() -> bool:
            for process in self.processes:
                process.poll()
            return not is_there(pid)

        await holds(is_gone, f"process {pid} has ended")

    def end_all(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@asynccontextmanager
async def restartable(folder: Path, *backends: ScriptedBackend, **sections: Any) -> AsyncIterator[Restartable]:
    """A gateway before these backends, once it is ready; `cap`: of each backend; `command`: what starts it. All its
    processes are killed after the block, and none may have complained."""
    port, admin_port = free_ports(2)
    environment: dict[str, str] = sections.pop("environment", {})
    command: tuple[str, ...] = sections.pop("command", ())
    cap, server = sections.pop("cap", 8), sections.pop("server", {})
    admin = {"port": admin_port, "allowed_hosts": ["gateway"], "token": "${GATEWAY_ADMIN_TOKEN:-}"}
    base = {"host": "127.0.0.1", "port": port, "admin": admin, "drain_delay_seconds": 0}
    listed = [{"url": backend.url, "max_in_flight": cap} for backend in backends]
    running = Restartable(folder, port, admin_port, environment)
    document = {"server": base | server, "backends": listed, "health": QUICK, **sections}
    running.file.write_text(yaml.safe_dump(document))
    running.start(command=command)
    try:
        await running.ready()
        yield running
    finally:
        running.end_all()
    assert not running.events("background_error"), running.events("background_error")
    assert not running.events("internal_error")
    assert b"Traceback" not in running.log_file.read_bytes(), running.log_file.read_text()
