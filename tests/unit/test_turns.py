"""Every reader of a peer's bytes, and how much of them it handles in one turn of the event loop."""

import ast
import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

import gateway
from gateway.core.backends import vllm_api
from gateway.core.backends.vllm_metrics import MetricsReader
from gateway.core.front.connection import ClientConnection
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import JSON, ClientResponse
from gateway.core.relay.connection import BackendConnection
from gateway.core.request import Demand, Tunnel
from gateway.core.tls.transport import EncryptedTransport
from gateway.core.turns import SLICE_BYTES, Intake
from gateway.features.coordination.connection import RedisConnection
from gateway.features.coordination.local_server import ReplicaConnection, TableServer
from gateway.features.realtime.tunnel import BackendSocket, SessionUsage
from gateway.features.realtime.websocket import FrameScanner
from tests.unit.front.clients import Scene
from tests.unit.relay.peers import FakeReceiver, FakeTransport
from tests.unit.scheduling.virtual_time import run, turns

GATEWAY = Path(gateway.__file__).parent
CLIENT_READ_BYTES = 65536
DEADLINE_SECONDS = 60.0
IDLE_TURNS = 1000

# What asyncio calls with a peer's bytes, and what functions call to read them.
CALLED = {"data_received", "buffer_updated", "datagram_received"}
READS = {"recv", "recv_into", "recvfrom", "recvmsg", "sock_recv", "recv_multipart", "readexactly", "readuntil"}
READS |= {"open_connection", "open_unix_connection", "start_server", "start_unix_server", "create_subprocess_exec"}
READS |= {"ClientSession", "ApiClient", "AppRunner", "AsyncConnectionPool", "S3Store", "Resolver"}
# Readers without an `Intake`, and what bounds a turn of each.
OTHERS = {
    "features/operate/admin_http.py": "aiohttp takes no more requests while one is answered; bodies are limited",
    "features/batches/postgres.py": "libpq reads; answers are pages of rows that a gateway wrote",
    "features/batches/s3.py": "obstore reads in threads of its own, ranges of a limited size",
    "cli/batch_client.py": "a command in a process of its own",
    "features/discovery/kubernetes.py": "aiohttp stops at 128 KiB that are not taken; events are taken a few at a time",
    "features/discovery/sources.py": "an answer of DNS has at most 64 KiB; backends are limited",
    "core/tls/transport.py": "one read of 16 KiB, then another turn",
    "features/handover/channel.py": "one message of 256 KiB from a process of the same user",
    "features/exact/endpoints.py": "ten bytes of a stream that asyncio stops reading at 128 KiB",
    "features/exact/stream.py": "a thread that pauses each half millisecond; messages are limited",
    "features/exact/tokenizer.py": "a process of this gateway",
    "features/page/playground.py": "this gateway's own port",
    "core/turns.py": "reads for one that is in the table",
    "features/workers/batches.py": "another worker of this gateway",
    "features/workers/line.py": "sixteen bytes of the parent or of a worker",
    "features/workers/parent.py": "starts workers, and reads nothing of them",
    "features/workers/ports.py": "another worker of this gateway",
}


def readers() -> Iterator[tuple[str, str]]:
    """Files, and the class or the call that reads there."""
    for file in sorted(GATEWAY.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                if any(isinstance(each, ast.FunctionDef) and each.name in CALLED for each in node.body):
                    yield file.relative_to(GATEWAY).as_posix(), node.name
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in READS:
                    yield file.relative_to(GATEWAY).as_posix(), called


class _Tunnel:
    """A client's side that takes everything."""

    is_greeted = blocked = False

    def open(self, send: object) -> None: ...

    def write(self, data: bytes) -> bool:
        return False

    def resume_reading(self) -> None: ...


def of_backend(kind: type[BackendConnection]) -> BackendConnection:
    connection = kind(0.0)
    connection.connection_made(cast(asyncio.Transport, FakeTransport()))
    connection.send(b"", FakeReceiver(connection))
    return connection


def of_tunnel(kind: type[BackendSocket]) -> BackendSocket:
    backend = kind(SessionUsage(Demand("m"), None))
    backend.handshake.set_result(101)
    backend.open(cast(Tunnel, _Tunnel()), lambda _: 0)
    return backend


def of_redis(kind: type[RedisConnection]) -> RedisConnection:
    connection = kind(lambda *_: None)
    connection._answers.append(asyncio.get_running_loop().create_future())
    return connection


def of_client(kind: type[ClientConnection]) -> ClientConnection:
    async def story(incoming: HttpRequest, reply: ClientResponse) -> None:
        reply.send(200, JSON, b"", b"{}")

    return kind(Scene(story), asyncio.get_running_loop())


def of_probe(kind: type[vllm_api._Connection]) -> vllm_api._Connection:
    connection = kind(asyncio.get_running_loop())
    connection.set_response_params()
    return connection


@dataclass(frozen=True)
class Flood:
    """A reader, and what its peer sends: a beginning, then the smallest items."""

    kind: type[Any]
    make: Callable[[Any], asyncio.BaseProtocol]
    head: bytes
    unit: bytes
    size_bytes: int = 4 << 20


OK, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"transfer-encoding: chunked\r\n\r\n"
PLAIN = b"content-length: 999999999\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
FLOODS = [
    Flood(BackendConnection, of_backend, OK + CHUNKED, b"1\r\nx\r\n"),
    Flood(BackendConnection, of_backend, OK + PLAIN, b"\n"),
    Flood(BackendConnection, of_backend, OK, b"a:\r\n"),
    Flood(BackendConnection, of_backend, b"", b"HTTP/1.1 100 \r\n\r\n"),
    Flood(BackendSocket, of_tunnel, b"", b"\x89\0"),
    Flood(BackendSocket, of_tunnel, b"", b"\x81\x01a"),
    Flood(RedisConnection, of_redis, b"*99999999\r\n", b"+\r\n"),
    Flood(RedisConnection, of_redis, b"", b">1\r\n+\r\n"),
    Flood(ReplicaConnection, lambda kind: kind(TableServer("run")), b"", b"+\r\n"),
    Flood(ClientConnection, of_client, POST + CHUNKED, b"5\r\nxxxxx\r\n"),
    Flood(ClientConnection, of_client, b"", b"GET / HTTP/1.1\r\nhost:\r\n\r\n", 1 << 20),
    Flood(ClientConnection, of_client, b"GET / HTTP/1.1\r\n", b"a:\r\n"),
    Flood(vllm_api._Connection, of_probe, OK + CHUNKED, b"1\r\nx\r\n"),
    Flood(vllm_api._Connection, of_probe, b"", b"HTTP/1.1 100 \r\n\r\n", 1 << 20),
]


class Meter:
    """Counts what a reader takes in each turn of the loop."""

    def __init__(self, flood: Flood) -> None:
        self.turn = 0
        self.taken: Counter[int] = Counter()
        self.ended = asyncio.Event()
        self.flood, self.kind = flood, self.metered(flood.kind)

    def next_turn(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self.next_turn)

    def metered(self, kind: type[Any]) -> type[Any]:
        """The kind of reader, which counts what it takes."""

        def connection_lost(reader: Any, error: Exception | None) -> None:
            self.ended.set()
            kind.connection_lost(reader, error)

        def data_received(reader: Any, data: bytes) -> None:
            if len(data) <= SLICE_BYTES and not self.ended.is_set():
                self.taken[self.turn] += len(data)
            kind.data_received(reader, data)

        def buffer_updated(reader: Any, nbytes: int) -> None:
            if not reader._deaf:  # what a refused client sends is dropped unread
                self.taken[self.turn] += nbytes
            kind.buffer_updated(reader, nbytes)

        read = buffer_updated if issubclass(kind, asyncio.BufferedProtocol) else data_received
        return type("Metered", (kind,), {read.__name__: read, "connection_lost": connection_lost})

    async def drowned(self) -> None:
        """Connect the reader to a peer that sends everything and closes, until it ends or takes nothing more."""
        flood, protocol = self.flood, self.flood.make(self.kind)
        own, other = socket.socketpair()
        sent = flood.head + flood.unit * (flood.size_bytes // len(flood.unit))
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, own)
        self.next_turn()
        Thread(target=_send, args=(other, sent), daemon=True).start()
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not self.ended.is_set() and (transport.is_reading() or self.turn < max(self.taken) + IDLE_TURNS):
                    await asyncio.sleep(0)
        finally:
            transport.abort()
            await self.ended.wait()
            other.close()


def _send(other: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        other.sendall(data)
        other.shutdown(socket.SHUT_WR)


def test_every_reader_is_in_the_table() -> None:
    tabled = {
        (flood.kind.__module__.removeprefix("gateway.").replace(".", "/") + ".py", flood.kind.__name__)
        for flood in FLOODS
    }
    sliced = {file for file, _ in tabled}
    found = [*readers()]
    assert {each for each in found if each[1] not in READS and each[0] not in OTHERS} == tabled
    assert {file for file, _ in found} - sliced == OTHERS.keys()


@pytest.mark.parametrize("flood", FLOODS, ids=lambda each: f"{each.kind.__name__} {each.head[-20:]} {each.unit}")
def test_no_peer_gets_more_than_a_slice_of_a_turn(flood: Flood) -> None:
    meter = Meter(flood)
    uvloop.run(meter.drowned())
    most = CLIENT_READ_BYTES if flood.kind is ClientConnection else SLICE_BYTES
    assert 0 < max(meter.taken.values()) <= 2 * most  # the last slice of a read, and the next read


def test_a_body_of_known_length_is_read_as_fast_as_it_comes() -> None:
    """It costs a copy, however long it is."""
    body = 4 << 20

    meter = Meter(Flood(ClientConnection, of_client, POST + b"content-length: %d\r\n\r\n" % body, b"x", body))
    uvloop.run(meter.drowned())
    assert sum(meter.taken.values()) > body
    assert max(meter.taken.values()) > CLIENT_READ_BYTES


class _Reads:
    """Takes slices, and notes whether it is held and in which turn."""

    def __init__(self) -> None:
        self.taken = b""
        self.transport = FakeTransport()
        self.intake = Intake()
        self.intake.begin(cast(asyncio.Transport, self.transport), self.take)

    def take(self, data: bytes) -> None:
        assert not self.intake.is_held
        assert len(data) <= SLICE_BYTES
        self.taken += data


STEPS = st.lists(st.one_of(st.integers(1, 3 * SLICE_BYTES), st.sampled_from(["hold", "go on", "pause", "turn"])))


@given(STEPS)
def test_slices_come_in_order_and_never_while_they_are_held(steps: list[int | str]) -> None:
    async def main() -> None:
        reads, sent = _Reads(), b""
        for number, step in enumerate(steps):
            if step == "hold":
                reads.intake.hold()
            elif step == "go on":
                reads.intake.go_on()
            elif step == "pause":
                reads.intake.pause()
            elif isinstance(step, int) and reads.transport.reading:
                data = bytes([number % 256]) * step
                sent += data
                before = len(reads.taken)
                reads.intake.cut(data)
                assert len(reads.taken) - before <= SLICE_BYTES
            else:
                before = len(reads.taken)
                await turns(1)
                assert len(reads.taken) - before <= SLICE_BYTES
            assert sent.startswith(reads.taken)
            assert not (reads.intake.rest and reads.transport.reading)
        reads.intake.go_on()
        await turns(len(sent) // SLICE_BYTES + len(steps) + 2)
        assert reads.taken == sent
        assert reads.transport.reading

    run(main())


@pytest.mark.parametrize("drops", [False, True])
def test_what_came_before_the_end_is_taken_unless_the_reader_gave_up(drops: bool) -> None:
    async def main() -> None:
        reads = _Reads()
        reads.intake.cut(b"x" * 100_000)
        if drops:
            reads.intake.drop()
        reads.intake.end()
        assert len(reads.taken) == (SLICE_BYTES if drops else 100_000)

    run(main())


class _Collects(asyncio.Protocol):
    """Notes what is read at once."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.ended = asyncio.Event()
        self.intake = Intake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.intake.begin(cast(asyncio.Transport, transport), lambda _: None)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()

    def data_received(self, data: bytes) -> None:
        self.reads.append(len(data))
        if len(data) > SLICE_BYTES:
            self.intake.cut(data)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_after_a_long_read_little_is_read_at_once_until_all_is_taken(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        own, other = socket.socketpair()
        transport, collects = await asyncio.get_running_loop().connect_accepted_socket(_Collects, own)
        Thread(target=_send, args=(other, bytes(4 << 20)), daemon=True).start()
        await collects.ended.wait()
        assert sum(collects.reads) == 4 << 20
        after = next(at for at, size in enumerate(collects.reads) if size > SLICE_BYTES) + 1
        assert max(collects.reads[after:]) <= 2 * SLICE_BYTES
        other.close()

        own, other = socket.socketpair()
        transport, collects = await asyncio.get_running_loop().connect_accepted_socket(_Collects, own)
        collects.intake.cut(bytes(2 * SLICE_BYTES))
        assert transport.get_protocol() is not collects
        await turns(2)
        collects.intake.renew()
        assert transport.get_protocol() is collects
        other.sendall(b"short")
        other.close()
        await collects.ended.wait()
        assert collects.reads == [5]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_bytes_after_an_answer_never_become_the_next_one() -> None:
    """The connection is not used again while bytes of it are not taken."""

    async def main() -> None:
        connection, transport = BackendConnection(0.0), FakeTransport()
        connection.connection_made(cast(asyncio.Transport, transport))
        receiver = FakeReceiver(connection)
        connection.send(b"", receiver)
        head = OK + b"content-length: %d\r\n\r\n"
        size = SLICE_BYTES - len(head % SLICE_BYTES)
        connection.data_received(head % size + b"x" * size + OK + b"content-length: 6\r\n\r\nforged")
        assert receiver.said[-2:] == ["end", "received"]
        assert not connection.rest(0.0)
        assert transport.aborted

    run(main())


@given(
    st.lists(st.sampled_from([b"\x89\0", b"\x81\x01a", b"\x81\x81maska", b"\x82\x7e\0\x80" + bytes(128)])), st.data()
)
def test_frames_are_counted_alike_in_any_slices(frames: list[bytes], data: st.DataObject) -> None:
    wire, scanner = b"".join(frames), FrameScanner()
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        scanner.scan(wire[:size])
        wire = wire[size:]
    assert (scanner.frames, scanner.is_between_frames) == (len(frames), True)


def test_each_new_series_of_metrics_is_a_step() -> None:
    lines = [b'vllm:num_requests_running{engine="%d"} 1' % number for number in range(100)]
    reader = MetricsReader()
    assert sum(1 for _ in reader.read(lines, 0.0)) == 100
    assert sum(1 for _ in reader.read(lines, 1.0)) == 0


def test_encrypted_bytes_are_read_once_in_a_turn() -> None:
    async def main() -> None:
        raw, scene = FakeTransport(), Scene()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        encrypted = EncryptedTransport(scene.client, context, 10.0, loop=asyncio.get_running_loop())
        encrypted._intake.begin(cast(asyncio.Transport, raw))
        encrypted._raw = cast(asyncio.Transport, raw)
        encrypted.get_buffer(-1)[:5] = b"\x16\x03\x01\x40\x00"  # the head of a record that needs more to be complete
        encrypted.buffer_updated(16384)
        assert (raw.reading, encrypted.is_reading()) == (False, True)  # the client itself is not held back
        await turns(2)
        assert raw.reading
        encrypted.get_buffer(-1)[:1] = b"\0"
        encrypted.buffer_updated(1)
        assert raw.reading

    run(main())
