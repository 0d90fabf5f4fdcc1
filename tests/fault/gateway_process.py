"""The gateway's command in a process of its own, with its standard output and error where a test wants them."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from loadtest.servers.processes import free_ports
from loadtest.servers.server import serves, wait_until
from tests.clients import Answer, Client, request
from tests.scripted import ScriptedBackend

READY_SECONDS = 30.0
EXIT_SECONDS = 15.0


class GatewayProcess:
    """A running command and its ports."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", port: int, admin_port: int, *, has_tls: bool = False
    ) -> None:
        self.process = process
        self.port = port
        self.admin_port = admin_port
        self.has_tls = has_tls

    @property
    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def memory_bytes(self) -> int:
        """What is resident of it."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    async def get(self, target: str, *, admin: bool = False) -> Answer:
        """One GET on a connection of its own."""
        async with await Client.connect(self.admin_port if admin else self.port) as client:
            await client.send(request(b"", method=b"GET", target=target.encode()))
            return await client.answer()

    async def client(self) -> Client:
        """A connection to the main port."""
        return await Client.connect(self.port)

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        page = (await self.get("/metrics", admin=True)).body.decode()
        lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        assert lines, f"no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def ready(self, processes: int = 1) -> None:
        """Wait until it serves; so many processes have to start."""
        port = self.admin_port if self.has_tls else self.port
        url, seconds = f"http://127.0.0.1:{port}/readyz", READY_SECONDS * processes
        await asyncio.to_thread(wait_until, lambda: serves(url), self.process.poll, seconds)

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.to_thread(self.process.wait, EXIT_SECONDS)


@asynccontextmanager
async def gateway_process(
    folder: Path,
    backend: ScriptedBackend,
    *,
    stdout: Any = subprocess.DEVNULL,
    stderr: Any = subprocess.DEVNULL,
    before: Callable[[], None] | None = None,
    sections: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    per_backend: dict[str, Any] | None = None,
    process_group: int | None = None,
    workers: int = 1,
    command: tuple[str, ...] = ("gateway",),
    environment: dict[str, str] | None = None,
) -> AsyncIterator[GatewayProcess]:
    """Start it before this backend and wait until it is ready; it is killed after the block if it still runs."""
    port, admin_port = free_ports(2)
    admin = {"port": admin_port, "allowed_hosts": ["gateway"]}  # as `tests.clients` names it
    base = {"host": "127.0.0.1", "port": port, "admin": admin, "drain_delay_seconds": 0, "workers": workers}
    file, more = folder / "gateway.yaml", server or {}
    backends = [{"url": backend.url, **(per_backend or {})}]
    file.write_text(yaml.safe_dump({"server": base | more, "backends": backends, **(sections or {})}))
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "serve", "-c", str(file)],
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, preexec_fn=before, process_group=process_group,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    running = GatewayProcess(process, port, admin_port, has_tls="tls" in more)
    try:
        await running.ready(workers if workers == 1 else workers + 1)
        yield running
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
