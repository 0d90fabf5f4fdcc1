"""Backends that cannot be reached, by TLS or otherwise: log, admin answer and check say why."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from tests.certificates import certificate
from tests.fault.rig import holds, running


@dataclass
class Place:
    """Where a backend is said to be."""

    url: str


@asynccontextmanager
async def listening(file: Path | None, client_ca: Path | None = None) -> AsyncIterator[int]:
    """A server that answers every request with 200, by TLS where it has a certificate."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        with suppress(ConnectionError):  # a connection may be closed unused
            await writer.drain()
        writer.close()

    context = None
    if file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def checked(url: str, trusted: Path | None) -> str:
    """What `gateway check` warns of."""
    environ = {**os.environ, **({"SSL_CERT_FILE": str(trusted)} if trusted else {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "check", "--json", "--backend", url, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=environ,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    [backend] = orjson.loads(out)["backends"]
    return str(backend["warnings"][0]) if backend["warnings"] else ""


async def test_the_reason_of_a_tls_failure_is_logged_and_shown(tmp_path: Path) -> None:
    file = certificate(tmp_path, name="IP:127.0.0.1", days=1)
    async with listening(file) as port, running(Place(f"https://127.0.0.1:{port}"), wait=False) as under_test:
        [backend] = under_test.gateway.core.fleet.backends
        await holds(lambda: backend.health.state == "down", "it is down")
        [shown] = under_test.gateway.operators.overview.backends()
        told = [event["reason"] for event in under_test.events if event["event"] == "backend_state"]
    assert shown["probe_error"] == "TLS: self-signed certificate"
    assert told == ["TLS: self-signed certificate"]


async def test_another_reason_is_logged_when_it_comes(tmp_path: Path) -> None:
    file = certificate(tmp_path, name="IP:127.0.0.1", days=1)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    async with running(Place(f"https://127.0.0.1:{port}"), wait=False) as under_test:
        [backend] = under_test.gateway.core.fleet.backends
        await holds(lambda: backend.health.probe_error == "connection refused", "it refuses")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port, ssl=context)
        async with server:
            await holds(lambda: backend.health.probe_error == "TLS: self-signed certificate", "it is told apart")
            told = [event["reason"] for event in under_test.events if event["event"] == "backend_unreachable"]
            assert told == ["TLS: self-signed certificate"]


@pytest.mark.parametrize(
    ("name", "days", "trusts", "reason"),
    [
        ("IP:127.0.0.1", 1, True, ""),
        ("IP:127.0.0.1", 1, False, "TLS: self-signed certificate"),
        ("DNS:engine.example", 1, True, "TLS: IP address mismatch"),
        ("IP:127.0.0.1", -1, True, "TLS: certificate has expired"),
    ],
)
async def test_a_check_tells_what_is_wrong_with_a_certificate(
    name: str, days: int, trusts: bool, reason: str, tmp_path: Path
) -> None:
    file = certificate(tmp_path, name=name, days=days)
    async with listening(file) as port:
        told = await checked(f"https://127.0.0.1:{port}", file if trusts else None)
    assert told.startswith(reason) if reason else "TLS" not in told


async def test_a_check_tells_of_a_server_without_tls_of_a_closed_port_and_of_an_unknown_name() -> None:
    async with listening(None) as port:
        assert (await checked(f"https://127.0.0.1:{port}", None)).startswith("TLS: ")
    assert await checked(f"http://127.0.0.1:{port}", None) == "connection refused."
    assert (await checked("http://engine.invalid:8000", None)).startswith("host name not resolved: ")


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    return made


async def test_a_backend_is_trusted_by_its_own_ca_and_name_and_shown_a_client_certificate(tmp_path: Path) -> None:
    engine = certificate(folder(tmp_path, "engine"), name="DNS:engine.example", days=1)
    client = certificate(folder(tmp_path, "client"), name="DNS:gateway.example", days=1)
    tls = {"ca": str(engine), "server_name": "engine.example", "certificate": str(client)}
    async with listening(engine, client_ca=client) as port:
        place = Place(f"https://127.0.0.1:{port}")
        async with running(place, per_backend={"tls": tls}) as under_test:  # its probes succeed
            pool = under_test.gateway.core.relay._pools[under_test.gateway.core.fleet.backends[0]]
            connection = await pool.take_new()
            assert connection.transport is not None
            assert connection.transport.get_extra_info("ssl_object").getpeercert()["subjectAltName"] == (
                ("DNS", "engine.example"),
            )
            pool.give_back(connection)
            pool.close()
        async with running(place, per_backend={"tls": {"ca": str(engine)}}, wait=False) as under_test:
            [backend] = under_test.gateway.core.fleet.backends
            await holds(
                lambda: "TLS: IP address mismatch" in str(backend.health.probe_error),
                lambda: repr(backend.health.probe_error),
            )


async def test_a_renewed_ca_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    old = certificate(folder(tmp_path, "old"), name="IP:127.0.0.1", days=1)
    new = certificate(folder(tmp_path, "new"), name="IP:127.0.0.1", days=1)
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(old.read_bytes())
    async with listening(new) as port:
        per_backend = {"tls": {"ca": str(trusted)}}
        async with running(Place(f"https://127.0.0.1:{port}"), per_backend=per_backend, wait=False) as under_test:
            [backend] = under_test.gateway.core.fleet.backends
            await holds(lambda: backend.health.probe_error == "TLS: self-signed certificate", "it is not trusted")
            trusted.write_bytes(new.read_bytes())
            await holds(lambda: backend.health.state == "up", "it is trusted")
            trusted.unlink()
            await holds(
                lambda: "cannot use CA" in str(backend.health.probe_error), lambda: repr(backend.health.probe_error)
            )
