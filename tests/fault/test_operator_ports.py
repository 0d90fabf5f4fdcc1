"""What clients of the ports for operators may take, and what they get for what is no HTTP."""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from gateway.features.operate import admin_http
from gateway.features.page import broadcast
from tests.clients import Client
from tests.fault.gateway_process import gateway_process
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import ScriptedBackend

STREAM = b"GET /admin/dashboard/stream HTTP/1.1\r\nhost: localhost\r\n\r\n"
LIVE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
GET = b"GET /admin/queue HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /admin/route HTTP/1.1\r\nhost: localhost\r\n"

MALFORMED = {
    "no method": b"\0\1\2\3\r\n\r\n",
    "bad method": b"G@T /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "bad version": b"GET /livez HTTP/9.9\r\nhost: localhost\r\n\r\n",
    "a long URL": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a long header": GET + b"x: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": GET + b"x: y\r\n" * 10_000 + b"\r\n",
    "NUL in a header": GET + b"x: \0\r\n\r\n",
    "NUL in the path": b"GET /\0 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no colon": GET + b"nonsense\r\n\r\n",
    "two lengths": POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "length and chunks": POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n{}",
    "a bad length": POST + b"content-length: -5\r\n\r\n",
    "a bad chunk": POST + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100c4010000c0030300") + bytes(200),
    "two hosts": GET + b"host: evil.example\r\n\r\n",
    "a bad expectation": GET + b"expect: nonsense\r\n\r\n",
    "no such path": b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "no such method": b"DELETE /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "not compressed": POST + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
}


async def answer_of(port: int, sent: bytes) -> tuple[int, bytes]:
    """The status, and the body up to the end of the connection or of what the first answer says is its length."""
    async with await Client.connect(port) as client:
        await client.send(sent)
        answer = await client.answer()
        return answer.status, answer.body


@pytest.mark.parametrize("workers", [1, 2])
async def test_malformed_http_is_answered_in_the_shape_of_errors_and_all_log_lines_stay_json(
    workers: int, backend: ScriptedBackend, tmp_path: Path
) -> None:
    log, access = tmp_path / "log", tmp_path / "access"
    with log.open("wb") as errors, access.open("wb") as out:
        async with gateway_process(tmp_path, backend, stdout=out, stderr=errors, workers=workers) as gateway:
            for name, sent in MALFORMED.items():
                status, body = await answer_of(gateway.admin_port, sent)
                assert 400 <= status < 500, (name, status, body)
                assert set(orjson.loads(body)["error"]) == {"message", "type", "param", "code"}, name
                await answer_of(gateway.port, sent)
            for cut in (
                POST + b"content-length: 100\r\n\r\n{",
                GET,
                b"G",
                POST + b"transfer-encoding: chunked\r\n\r\n5\r\n",
            ):
                with socket.create_connection(("127.0.0.1", gateway.admin_port)) as peer:
                    peer.sendall(cut)
            status, _ = await answer_of(gateway.admin_port, LIVE)
            assert status == 200
            gateway.process.terminate()
            assert await gateway.ended() == 0
    lines = [orjson.loads(line) for line in (*log.read_bytes().splitlines(), *access.read_bytes().splitlines())]
    assert len(lines) > len(MALFORMED)  # the main port's access log
    assert [line for line in lines if line.get("event") == "output" or line.get("level") == "error"] == []


@pytest.mark.parametrize("workers", [1, 2])
async def test_connections_to_each_port_are_bounded_and_others_are_served(
    workers: int, backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with gateway_process(tmp_path, backend, workers=workers) as gateway:
        idle, crowd = gateway.descriptors, 400
        with ExitStack() as stack:
            for _ in range(crowd):
                stack.enter_context(socket.create_connection(("127.0.0.1", gateway.admin_port), 10))
            await holds(lambda: gateway.descriptors >= idle + 60, "the first ones are accepted")
            assert (await answer_of(gateway.port, LIVE))[0] == 200
            await holds(lambda: gateway.descriptors <= idle + 64, "the others are closed")
        await holds(lambda: gateway.descriptors <= idle + 8, "their sockets are closed")
        assert (await answer_of(gateway.admin_port, LIVE))[0] == 200


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    for name in ("_HEAD_SECONDS", "_IDLE_SECONDS", "_BODY_SECONDS", "_UNREAD_SECONDS"):
        monkeypatch.setattr(admin_http, name, 0.3)
    monkeypatch.setattr(admin_http, "_LOOK_SECONDS", 0.05)


ADMIN = {"server": {"admin": {"port": 0}, "metrics": {"host": "127.0.0.1", "port": 0}}}
SLOW_HEADS = {
    "nothing": b"",
    "a byte": b"G",
    "a method": b"GET /livez",
    "half a head": GET,
    "a request and half a head": LIVE + GET,
    "half a body": POST + b"content-length: 1000\r\n\r\n{",
    "half a body that nothing reads": b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{",
    "half a chunk": POST + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sent", SLOW_HEADS.values(), ids=SLOW_HEADS)
async def test_a_request_that_does_not_arrive_is_given_up(sent: bytes, backend: ScriptedBackend) -> None:
    async with running(backend, sections=ADMIN) as under_test:
        assert under_test.admin_port is not None
        async with await Client.connect(under_test.admin_port) as client:
            await client.send(sent)
            await client.end()


def places(under_test: UnderTest) -> int:
    """How many connections the admin port has."""
    server = under_test.gateway.operators.admin_port._server
    assert server is not None
    return len(server.open)


@pytest.mark.usefixtures("quick")
async def test_answers_of_every_path_that_are_not_read_are_given_up(backend: ScriptedBackend) -> None:
    async with running(backend, sections=ADMIN) as under_test:
        assert under_test.admin_port is not None
        paths = {route.path for route in under_test.gateway.operators.admin_routes() if route.method == "GET"}
        assert {"/metrics", "/admin/usage", "/admin/dashboard/stream", "/"} <= paths
        for path in sorted(paths - {"/admin/dashboard/stream"}):  # which is one answer of a few bytes a second
            ask = b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode()
            async with await Client.connect(under_test.admin_port, receive_buffer_bytes=2048) as client:
                sending = asyncio.create_task(client.send(*[ask] * 20_000))
                await holds(lambda: places(under_test) == 1, "it is connected")
                await holds(lambda: places(under_test) == 0, f"{path.decode() if isinstance(path, bytes) else path}")
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        assert under_test.gateway.operators.dashboard.watchers == 0


@pytest.mark.usefixtures("quick")
async def test_watchers_that_do_not_read_lose_their_places(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list[str]()

    def large_event(name: str, _: object) -> bytes:
        names.append(name)
        return b"event: %b\ndata: %b\n\n" % (name.encode(), b"x" * 10_000_000)

    monkeypatch.setattr(broadcast, "event", large_event)
    async with running(backend, sections=ADMIN) as under_test:
        assert under_test.admin_port is not None
        with ExitStack() as stack:
            for _ in range(broadcast.MOST_WATCHERS):
                client = await Client.connect(under_test.admin_port, receive_buffer_bytes=4096)
                stack.callback(client.close)
                await client.send(STREAM)
            dashboard = under_test.gateway.operators.dashboard
            await holds(lambda: names.count("full") == broadcast.MOST_WATCHERS, "all have watched")
            await holds(lambda: dashboard.watchers == 0, "their places are free")
            async with await Client.connect(under_test.admin_port) as operator:
                await operator.send(STREAM)
                assert b"200 OK" in await operator.read()
