"""What clients with TLS may take: connections, from the moment they are accepted, and memory while they do not read."""

import asyncio
import os
import select
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import uvloop

from gateway.core.relay.upstream import UpstreamResponse
from gateway.core.tls.transport import EncryptedTransport
from tests import live_bytes
from tests.certificates import certificate
from tests.clients import chat, request
from tests.fault.gateway_process import gateway_process
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import drained, hang, head

LIVE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
ALLOWED, CROWD = 20, 600
KIBIBYTE = 1024
PIECE = b"8000\r\n" + b"x" * 0x7FFE + b"\n\n\r\n"
ENDLESS = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
PIECES = 400


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The gateway's certificate with its key."""
    return certificate(tmp_path, name="IP:127.0.0.1", days=1)


def hello() -> bytes:
    """What a client sends first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def connected(port: int, trusted: Path, receive_buffer_bytes: int = 65536) -> ssl.SSLSocket:
    """A client whose handshake has ended."""
    context = ssl.create_default_context(cafile=trusted)
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    peer.settimeout(10)
    peer.connect(("127.0.0.1", port))
    return context.wrap_socket(peer, server_hostname="127.0.0.1")


def plain(port: int, _: Path, receive_buffer_bytes: int) -> socket.socket:
    """A client without TLS."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    peer.connect(("127.0.0.1", port))
    return peer


def is_alive(client: ssl.SSLSocket) -> bool:
    client.sendall(LIVE)
    return b" 200 " in client.recv(65536).split(b"\r\n")[0]


def crowd(port: int, sent: bytes) -> list[socket.socket]:
    """Clients that send this and nothing more."""
    peers = []
    for _ in range(CROWD):
        peers.append(socket.create_connection(("127.0.0.1", port), 10))
        peers[-1].setblocking(False)
        with suppress(ConnectionError):  # it is over the limit
            peers[-1].sendall(sent)
    return peers


def is_closed(peer: socket.socket) -> bool:
    """Whether the gateway has closed this connection."""
    try:
        while peer.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    ("sent", "stays"),
    [(b"", True), (hello()[:40], True), (hello(), True), (LIVE, False), (b"\x16\x03\x01\x00\x10" + bytes(16), False)],
    ids=["nothing", "half a ClientHello", "ClientHello", "plain HTTP", "no ClientHello"],
)
async def test_every_accepted_socket_counts_and_those_over_the_limit_are_closed(
    sent: bytes, stays: bool, own: Path, backend: ScriptedBackend, tmp_path: Path
) -> None:
    server = {"tls": {"certificate": str(own)}, "max_connections": ALLOWED, "header_timeout_seconds": 60}
    log = tmp_path / "log"
    with ExitStack() as stack:
        sink = stack.enter_context(log.open("wb"))
        async with gateway_process(tmp_path, backend, stderr=sink, server=server) as gateway:
            before = stack.enter_context(await asyncio.to_thread(connected, gateway.port, own))
            assert await asyncio.to_thread(is_alive, before)
            idle = gateway.descriptors
            peers = await asyncio.to_thread(crowd, gateway.port, sent)
            stay = ALLOWED - 1 if stays else 0
            await holds(lambda: sum(map(is_closed, peers)) == CROWD - stay, "those over the limit are closed")
            assert gateway.descriptors <= idle + ALLOWED
            assert await asyncio.to_thread(is_alive, before)
            if stays:
                with pytest.raises(OSError):  # noqa: PT011 - reset, or closed in the handshake
                    await asyncio.to_thread(connected, gateway.port, own)
            for peer in peers:
                peer.close()
            await holds(lambda: gateway.descriptors <= idle, "their sockets are closed")
            after = stack.enter_context(await asyncio.to_thread(connected, gateway.port, own))
            assert await asyncio.to_thread(is_alive, after)
    assert b"Traceback" not in log.read_bytes()


async def test_a_drain_does_not_wait_for_handshakes(own: Path, backend: ScriptedBackend, tmp_path: Path) -> None:
    server = {"tls": {"certificate": str(own)}, "header_timeout_seconds": 60, "drain_timeout_seconds": 300}
    async with gateway_process(tmp_path, backend, server=server) as gateway:
        idle = gateway.descriptors
        with socket.create_connection(("127.0.0.1", gateway.port), 10) as peer:
            peer.sendall(hello()[:40])
            await holds(lambda: gateway.descriptors == idle + 1, "it is accepted")
            gateway.process.terminate()
            assert await gateway.ended() == 0


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_session_is_passed_on_in_both_directions_and_ends_in_good_order(
    loop: Callable[[], asyncio.AbstractEventLoop], own: Path
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(echoes(own))


class Echo(asyncio.BufferedProtocol):
    """Sends back what comes, reads nothing while that is not sent, and closes at `end`."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(65536))
        self.transport: asyncio.Transport
        self.lost = asyncio.get_running_loop().create_future()
        self.most_unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=4096)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])
        self.transport.write(data)
        self.most_unsent = max(self.most_unsent, self.transport.get_write_buffer_size())
        if data.endswith(b"end"):
            self.transport.close()

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()


async def echoes(own: Path) -> None:
    loop, accepted = asyncio.get_running_loop(), list[Echo]()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own)

    def accept() -> EncryptedTransport:
        accepted.append(Echo())
        return EncryptedTransport(accepted[-1], context, 10.0, loop=loop)

    async with await loop.create_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with await asyncio.to_thread(connected, port, own) as client:
            sent = os.urandom(3_000_000) + b"end"
            assert await asyncio.to_thread(exchanged, client, sent) == sent
        async with asyncio.timeout(20):
            assert await accepted[0].lost is None
        assert accepted[0].most_unsent <= 65536


def exchanged(client: ssl.SSLSocket, data: bytes) -> bytes:
    """What comes up to a close_notify, while this is sent; another end would be an error.

    In one thread: OpenSSL's sessions are not for two.
    """
    client.setblocking(False)
    rest, received = memoryview(data), bytearray()
    while True:
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if rest:
                rest = rest[client.send(rest[:65536]) :]
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while data := client.recv(65536):
                received += data
            return bytes(received)
        select.select([client], [client] if rest else [], [], 10)


@pytest.mark.parametrize("piece", [PIECE, ENDLESS], ids=["events", "one event"])
@pytest.mark.parametrize("tls", ["", "clients", "backends", "clients and backends"])
async def test_clients_that_do_not_read_take_little_memory_each(
    tls: str, piece: bytes, own: Path, tmp_path: Path
) -> None:
    count = 40
    async with ScriptedBackend(certificate=own if "backends" in tls else None) as backend:
        backend.plays(head(200), drained(piece, PIECES), hang())
        sections = {"server": {"tls": {"certificate": str(own)}}} if "clients" in tls else {}
        trust = {"tls": {"ca": str(own)}} if "backends" in tls else {}
        async with running(backend, sections=sections, per_backend=trust) as under_test:
            connect = partial(connected if "clients" in tls else plain, under_test.port, own, 4096)
            with ExitStack() as stack:
                for _ in range(count):
                    client = stack.enter_context(await asyncio.to_thread(connect))
                    await asyncio.to_thread(client.sendall, request(chat(stream=True)))
                connections, exchanges = (
                    under_test.gateway.server._connections,
                    under_test.gateway.core.relay._under_way,
                )
                await holds(lambda: sum(each.blocked for each in connections) == count, "all clients are blocked")
                await holds(lambda: held_back(backend) == count, "the backend can send no more")
                assert all(each._connection._intake.is_held for each in exchanges)
                unsent = max(each._transport.get_write_buffer_size() for each in connections)  # type: ignore[union-attr]
                unread = max(map(unread_bytes, exchanges))
                assert unsent + unread <= 256 * KIBIBYTE
                assert unread <= 64 * KIBIBYTE
                if not tls:  # else some are those of the backend, in this process
                    assert live_bytes.large_bytes() == []


def unread_bytes(exchange: UpstreamResponse) -> int:
    """What the gateway has of an answer before it is written to the client, and its buffer for reads."""
    connection, events, buffer = exchange._connection, exchange._events, 32 * KIBIBYTE
    assert events is not None
    encrypted = connection.transport
    received = encrypted._received.pending if isinstance(encrypted, EncryptedTransport) else 0
    return buffer + received + sum(map(len, connection._intake.rest)) + len(events._partial)


def held_back(backend: ScriptedBackend) -> int:
    """How many connections of the backend take no more."""
    return sum(each.transport.get_write_buffer_size() > 262144 for each in backend.connections)
