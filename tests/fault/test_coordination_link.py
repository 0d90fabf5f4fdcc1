"""A replica's link to a real Redis or Valkey: passwords, TLS, Sentinels, messages, and what makes it connect again.

Messages also go through the store that the parent of several workers serves.
"""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.core.supervisor import Supervisor
from gateway.features.coordination.settings import CoordinationConfig
from gateway.features.coordination.store import StoreLost
from loadtest.servers.processes import free_ports
from tests.certificates import certificate
from tests.redis_server import any_store, redis_server, sentinel

pytest.importorskip("hiredis")
from hiredis import pack_command

from gateway.features.coordination.link import RedisLink

_DEADLINE_SECONDS = 60.0


@asynccontextmanager
async def link_to(url: str, replica: str = "a", **values: Any) -> AsyncIterator[RedisLink]:
    link = RedisLink(CoordinationConfig(url=url, **values), replica, Supervisor(asyncio.get_running_loop().time))
    async with link.open():
        yield link


async def until_answered(link: RedisLink, *words: str) -> Any:
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while True:
            try:
                return await link.ask(*words)
            except StoreLost:
                await asyncio.sleep(0.05)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while not true():
            await asyncio.sleep(0.02)


async def until_lost(link: RedisLink, reason: str) -> None:
    """Calls fail for this reason, once a connection has been tried."""
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while True:
            with pytest.raises(StoreLost) as error:
                await link.ask("PING")
            if reason in str(error.value):
                return


async def test_a_link_presents_its_password_name_and_database(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.ask("CONFIG SET requirepass s3cret")
        async with link_to(f"{server.url}/3", password="s3cret") as link:
            info = await until_answered(link, "CLIENT", "INFO")
            assert b" name=gateway:a " in info
            assert b" db=3 " in info
        async with link_to(server.url, password="other") as link:
            await until_lost(link, "WRONGPASS")


async def test_a_link_checks_the_certificate_of_the_server(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    file = str(certificate(tmp_path, name="IP:127.0.0.1", days=1))
    (port,) = free_ports(1)
    files = ("--tls-cert-file", file, "--tls-key-file", file, "--tls-ca-cert-file", file)
    with redis_server(tmp_path, options=("--tls-port", str(port), "--tls-auth-clients", "no", *files)):
        async with link_to(f"rediss://127.0.0.1:{port}", ca=str(tmp_path / "cert.pem")) as link:
            assert await until_answered(link, "PING")
            await link.until_present()
        async with link_to(f"rediss://localhost:{port}", ca=str(tmp_path / "cert.pem")) as link:
            await until_lost(link, "certificate")
        async with link_to(f"rediss://127.0.0.1:{port}") as link:
            await until_lost(link, "certificate")


async def test_a_link_goes_through_a_unix_socket(tmp_path: Path) -> None:
    with redis_server(tmp_path, options=("--unixsocket", str(tmp_path / "s"))):
        async with link_to(f"unix://{tmp_path}/s") as link:
            assert await until_answered(link, "SET", "k", "v")
            assert await link.ask("GET", "k") == b"v"


async def test_a_link_follows_the_sentinels_to_another_primary(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with redis_server(tmp_path / "one") as one:
        follows = ("--replicaof", "127.0.0.1", str(one.port), "--repl-diskless-sync-delay", "0")
        with redis_server(tmp_path / "two", options=follows) as two, sentinel(tmp_path, one, "fleet") as port:
            async with link_to(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/fleet") as link:
                first = await until_answered(link, "CONFIG", "GET", "port")
                assert str(one.port).encode() in str(first).encode()
                await until(lambda: ",slaves=1," in one_line(tmp_path, port))
                one.stop()
                async with asyncio.timeout(_DEADLINE_SECONDS):
                    while str(two.port) not in str(await until_answered(link, "CONFIG", "GET", "port")):
                        await asyncio.sleep(0.1)
                await until_answered(link, "SET", "k", "v")


def one_line(folder: Path, port: int) -> str:
    """What the Sentinel says of the server that it watches."""
    import socket

    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        connection.sendall(b"INFO sentinel\r\n")
        return connection.recv(1 << 16).decode()


@pytest.mark.parametrize("kind", ["redis", "parent"])
async def test_messages_are_heard_on_the_channels_that_are_wanted_now(tmp_path: Path, kind: str) -> None:
    heard: list[tuple[str, bytes]] = []
    async with any_store(kind, tmp_path) as url, link_to(url) as one, link_to(url, "b") as two:
        x, y = one.name("x"), one.name("y")
        await until_answered(one, "PING")
        await until_answered(two, "PING")
        await one.listen({x: lambda data: heard.append(("x", data))})
        assert two.publish(x, b"\x00\xff")
        assert two.publish(y, b"not heard")
        await until(lambda: heard == [("x", b"\x00\xff")])
        assert await two.ask("GET", "nothing") is None  # answers go on in order
        await one.listen({y: lambda data: heard.append(("y", data))})
        assert two.publish(x, b"not any more")
        assert two.publish(y, b"2")
        await until(lambda: heard[1:] == [("y", b"2")])


async def test_a_link_that_the_server_closes_is_made_again_with_its_channels(tmp_path: Path) -> None:
    heard: list[bytes] = []
    with redis_server(tmp_path) as server:
        async with link_to(server.url) as link:
            await until_answered(link, "PING")
            await link.listen({link.name("x"): heard.append})
            before = await link.ask("CLIENT", "ID")
            server.ask("CLIENT KILL TYPE normal")
            server.ask("CLIENT KILL TYPE pubsub")
            await until(lambda: not link.is_up)
            assert not link.publish(link.name("x"), b"lost")
            await until(lambda: link.is_up)
            assert await link.ask("CLIENT", "ID") != before
            assert link.publish(link.name("x"), b"1")
            await until(lambda: heard == [b"1"])


async def test_a_channel_that_is_refused_fails_the_call(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        server.ask("ACL SETUSER g on >s3cret +@all ~* resetchannels &{gateway}:here:*")
        async with link_to(server.url, username="g", password="s3cret") as link:
            await until_answered(link, "PING")
            with pytest.raises(StoreLost, match="NOPERM"):
                await link.listen({link.name("x"): lambda _: None})
            await until_lost(link, "NOPERM")


async def test_the_parents_store_agrees_on_one_value_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    async with any_store("parent", tmp_path) as url, link_to(url) as one, link_to(url, "b") as two:
        for link, value in ((one, b"first"), (two, b"second")):
            await until_answered(link, "SET", "secret", value.decode(), "NX")
            assert await link.ask("GET", "secret") == b"first"
        for words in (("FLUSHALL",), ("SET", "secret", "x"), ("EVALSHA", "other", "1", "k", "p", "me"), ("GET",)):
            await until(lambda: one.is_up)
            with pytest.raises(StoreLost, match="ERR"):
                await one.ask(*words)


async def test_a_replica_that_reads_nothing_is_cut_off_and_the_others_are_not_held_up(tmp_path: Path) -> None:
    heard: list[int] = []
    async with any_store("parent", tmp_path) as url, link_to(url) as one:
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(url.removeprefix("unix://"))
        with deaf:
            deaf.sendall(pack_command(("SUBSCRIBE", one.name("x"))))
            await until_answered(one, "PING")
            await one.listen({one.name("x"): lambda data: heard.append(len(data))})
            for number in range(40):
                assert one.publish(one.name("x"), bytes(1 << 19))
                await until(lambda number=number: len(heard) > number)  # type: ignore[misc]
            deaf.settimeout(_DEADLINE_SECONDS)
            with suppress(ConnectionResetError):
                while deaf.recv(1 << 20):
                    pass


async def test_what_is_no_command_ends_the_connection_and_no_other(tmp_path: Path) -> None:
    async with any_store("parent", tmp_path) as url, link_to(url) as link:
        reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(_DEADLINE_SECONDS):
            assert await reader.read() == b""
        writer.close()
        assert await until_answered(link, "PING") is not None
