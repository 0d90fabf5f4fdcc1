"""Listening sockets are passed to the gateway by systemd, and from one process to the next."""

import socket
import sys
from pathlib import Path

import yaml

from loadtest.servers.processes import free_ports
from tests.clients import Answer, Client, chat, request
from tests.fault.restartable import restartable
from tests.fault.test_restarts import stops
from tests.scripted import ScriptedBackend
from tests.scripts import json_answer


async def test_sockets_of_systemd_wait_for_the_gateway(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway:
        await stops(gateway)
        (metrics_port,) = free_ports(1)
        server = yaml.safe_load(gateway.file.read_text())["server"]
        gateway.rewrite(
            server=server | {"metrics": {"host": "127.0.0.1", "port": metrics_port, "allowed_hosts": ["gateway"]}}
        )
        ports = gateway.port, gateway.admin_port, metrics_port
        passed = [socket.create_server(("127.0.0.1", port)) for port in ports]
        fds = tuple(each.fileno() for each in passed)
        async with await gateway.client() as early:  # before the gateway has started
            await early.send(request(chat()))
            gateway.start(pass_fds=fds, command=launcher(*fds))
            assert (await early.answer()).status == 200
        for each in passed:
            each.close()
        assert (await gateway.asks_admin("/admin/backends", b"GET")).status == 200
        assert (await asked(metrics_port, b"/readyz")).status == 200
        await gateway.restart()
        assert (await gateway.ask(chat())).status == 200
        assert (await asked(metrics_port, b"/readyz")).status == 200


async def asked(port: int, target: bytes, *headers: bytes) -> Answer:
    async with await Client.connect(port) as client:
        await client.send(request(b"", *headers, method=b"GET", target=target))
        return await client.answer()


def listening_socket(port: int) -> str:
    """The inode of the socket that listens at this port."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = {row[9] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}
    return inode


async def test_the_metrics_port_and_the_token_pass_over_a_restart(tmp_path: Path, backend: ScriptedBackend) -> None:
    (metrics_port,) = free_ports(1)
    server = {"metrics": {"host": "127.0.0.1", "port": metrics_port, "allowed_hosts": ["gateway"]}}
    environment = {"GATEWAY_ADMIN_TOKEN": "s3cret"}
    async with restartable(tmp_path, backend, server=server, environment=environment) as gateway:
        before = listening_socket(metrics_port)
        for _ in range(2):
            await gateway.restart()
            assert listening_socket(metrics_port) == before
            assert b"gateway_backend_up" in (await asked(metrics_port, b"/metrics")).body
        token = b"authorization: Bearer s3cret"
        assert (await asked(gateway.admin_port, b"/admin/queue")).status == 401
        assert (await asked(gateway.admin_port, b"/admin/queue", token)).status == 200
        assert (await asked(metrics_port, b"/admin/queue", token)).status == 404


_LAUNCHER = """
import fcntl, os, sys
moved = [fcntl.fcntl(int(given), fcntl.F_DUPFD, 100) for given in sys.argv[1:4]]
for number, each in enumerate(moved):
    os.dup2(each, 3 + number)
    os.close(each)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "http:admin:metrics"}
os.execv(sys.argv[4], sys.argv[4:])
"""


def launcher(*fds: int) -> tuple[str, ...]:
    """Passes three sockets as systemd does: as descriptors 3, 4 and 5, to the process with LISTEN_PID."""
    return (sys.executable, "-c", _LAUNCHER, *map(str, fds))
