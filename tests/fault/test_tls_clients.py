"""The client port with TLS: handshakes, client certificates, files that change, and clients at a hand-over."""

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest
from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient

from tests.certificates import certificate
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import stream

HELLO = [{"role": "user", "content": "Hello"}]


def made(parent: Path, name: str) -> Path:
    """A certificate with its key, in a folder of its own."""
    (parent / name).mkdir()
    return certificate(parent / name, name="IP:127.0.0.1", days=1)


def sections(file: Path, **more: str) -> dict[str, dict[str, object]]:
    return {"server": {"tls": {"certificate": str(file), **more}}}


def sdk(under_test: UnderTest, trusted: Path, shown: Path | None = None) -> AsyncOpenAI:
    context = ssl.create_default_context(cafile=trusted)
    if shown is not None:
        context.load_cert_chain(shown)
    url = f"https://127.0.0.1:{under_test.port}/v1"
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=DefaultAsyncHttpxClient(verify=context))


async def serial_number(under_test: UnderTest) -> bytes:
    """Of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", under_test.port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return bytes(shown)


async def test_a_chat_and_a_stream_over_tls(backend: ScriptedBackend, tmp_path: Path) -> None:
    file = made(tmp_path, "own")
    async with running(backend, sections=sections(file)) as under_test, sdk(under_test, file) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert whole.choices[0].message.content
        backend.plays(*stream())
        events = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        assert len([event async for event in events]) >= 3
        assert under_test.outcomes == {"completed": 2}


async def test_plain_http_to_a_port_with_tls_is_closed(backend: ScriptedBackend, tmp_path: Path) -> None:
    async with running(backend, sections=sections(made(tmp_path, "own"))) as under_test:
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" not in await reader.read()
        writer.close()
        assert under_test.outcomes == {}


async def test_clients_without_the_right_certificate_are_refused(backend: ScriptedBackend, tmp_path: Path) -> None:
    own, client, stranger = (made(tmp_path, name) for name in ("own", "client", "stranger"))
    async with running(backend, sections=sections(own, client_ca=str(client))) as under_test:
        async with sdk(under_test, own, shown=client) as known:
            assert await known.chat.completions.create(model=MODEL, messages=HELLO)
        for shown in (None, stranger):
            async with sdk(under_test, own, shown=shown) as unknown:
                with pytest.raises(APIConnectionError):
                    await unknown.chat.completions.create(model=MODEL, messages=HELLO)
        assert under_test.outcomes == {"completed": 1}


async def test_a_renewed_certificate_is_shown_and_a_broken_one_is_not(backend: ScriptedBackend, tmp_path: Path) -> None:
    old, new, file = made(tmp_path, "old"), made(tmp_path, "new"), tmp_path / "tls.pem"
    file.write_bytes(old.read_bytes())

    def seen(event: str) -> bool:
        return any(each["event"] == event for each in under_test.events)

    async with running(backend, sections=sections(file)) as under_test:
        before = await serial_number(under_test)
        file.write_bytes(old.read_bytes()[:300])
        await holds(lambda: seen("certificate_not_read"), "it is read")
        assert await serial_number(under_test) == before
        file.write_bytes(new.read_bytes())
        await holds(lambda: seen("certificate_read"), "it is read")
        assert await serial_number(under_test) not in (before, b"")


async def test_at_a_hand_over_idle_clients_with_tls_are_closed_and_plain_ones_not_taken(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    file, given = made(tmp_path, "own"), list[int]()
    async with running(backend, sections=sections(file)) as under_test:
        context = ssl.create_default_context(cafile=file)
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.port, ssl=context)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        giving = asyncio.create_task(under_test.gateway.server.give_away(given.append))
        async with asyncio.timeout(10):
            await reader.read()  # to its end
            await giving
        writer.close()
        assert given == []
        ours, theirs = socket.socketpair()
        await under_test.gateway.server.adopt(theirs)
        assert ours.recv(1) == b""
        ours.close()


async def test_a_client_that_never_ends_its_handshake_is_closed(backend: ScriptedBackend, tmp_path: Path) -> None:
    settings = {"server": {**sections(made(tmp_path, "own"))["server"], "header_timeout_seconds": 0.2}}
    async with running(backend, sections=settings) as under_test:
        files = len(os.listdir("/proc/self/fd"))
        reader, writer = await asyncio.open_connection("127.0.0.1", under_test.port)
        writer.write(b"\x16\x03\x01")
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
        await holds(lambda: len(os.listdir("/proc/self/fd")) <= files, "its socket is closed")
