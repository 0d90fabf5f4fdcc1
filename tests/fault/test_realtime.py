"""Realtime sessions: each holds a slot from the upgrade to its end, and gives it back however it ends."""

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import websockets

from tests.clients import EndOfConnection
from tests.fault.rig import BACKEND_KEY, UnderTest, holds, running
from tests.realtime_engine import RealtimeEngine
from tests.scripted import ScriptedBackend
from tests.scripts import answer

AUDIO = base64.b64encode(bytes(3200)).decode()
APPEND = json.dumps({"type": "input_audio_buffer.append", "audio": AUDIO})
COMMIT = json.dumps({"type": "input_audio_buffer.commit"})
FINAL = json.dumps({"type": "input_audio_buffer.commit", "final": True})
KEYS = {"auth": {"keys": [{"name": "ann", "key": "sk-ann"}]}}
UPGRADE = (
    b"GET /v1/realtime%b HTTP/1.1\r\nhost: gateway\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n%b\r\n"
)


def update(model: str) -> str:
    return json.dumps({"type": "session.update", "model": model})


def connect(under_test: UnderTest, query: str = "", **options: Any) -> Any:
    """A session of the library that vLLM's own client uses."""
    return websockets.connect(f"ws://127.0.0.1:{under_test.port}/v1/realtime{query}", **options)


async def event(session: Any) -> dict[str, Any]:
    async with asyncio.timeout(10):
        return dict(json.loads(await session.recv()))


@asynccontextmanager
async def speaking(under_test: UnderTest, query: str = "", **options: Any) -> AsyncIterator[Any]:
    """A session whose first audio was answered."""
    async with connect(under_test, query, **options) as session:
        assert (await event(session))["type"] == "session.created"
        await session.send(update("scripted"))
        await session.send(APPEND)
        assert (await event(session))["type"] == "transcription.delta"
        yield session


async def send_for_ever(session: Any) -> None:
    while True:
        await session.send("x" * 65536)


async def close_code(session: Any) -> int:
    """With which code the gateway closes the session; what comes before that is dropped."""
    try:
        async with asyncio.timeout(10):
            while True:
                await session.recv()
    except websockets.ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else 1006


async def test_vllms_own_client_transcribes_through_the_gateway() -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test:
        async with connect(under_test) as session:
            assert (await event(session))["type"] == "session.created"
            for text in (update("scripted"), COMMIT, APPEND, APPEND, FINAL):
                await session.send(text)
            deltas = [await event(session) for _ in range(2)]
            assert [each["type"] for each in deltas] == ["transcription.delta"] * 2
            assert (await event(session))["text"] == "lala"
            assert under_test.in_flight == 1
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert under_test.outcomes == {"completed": 1}
        [seen] = engine.sessions
        assert seen.headers["authorization"] == f"Bearer {BACKEND_KEY}"
        assert seen.code == 1000
    [line] = [json.loads(each) for each in under_test.log.getvalue().splitlines()]
    assert (line["endpoint"], line["status"], line["request_id"]) == ("realtime", 101, seen.request_id)


async def test_another_library_does_too_with_long_and_short_messages() -> None:
    async with (
        RealtimeEngine(delta="x" * 70000) as engine,
        running(engine) as under_test,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"http://127.0.0.1:{under_test.port}/v1/realtime?model=scripted", compress=15) as session,
    ):
        await session.receive_json()
        for size in (1, 125, 126, 65535, 65536, 300000):
            await session.send_json({"type": "input_audio_buffer.append", "audio": "A" * (size // 4 * 4)})
            assert len((await session.receive_json())["delta"]) == 70000
        await session.ping()
        await session.send_str(FINAL)
        assert len((await session.receive_json())["text"]) == 6 * 70000


@pytest.mark.parametrize(("query", "backends"), [("?model=scripted", 2), ("", 1)])
async def test_an_unknown_model_and_a_missing_slot_are_refused_before_the_upgrade(query: str, backends: int) -> None:
    async with RealtimeEngine() as engine:
        limits = {"admission": {"max_queued_requests": 0}}
        async with running(engine, sections=limits, per_backend={"max_in_flight": 1}) as under_test:
            for refused, status in (("?model=absent", 404), (query, 429)):
                async with speaking(under_test):
                    with pytest.raises(websockets.InvalidStatus) as caught:
                        await connect(under_test, refused)
                    assert caught.value.response.status_code == status
                    assert set(json.loads(caught.value.response.body)["error"]) == {"message", "type", "param", "code"}
                await holds(lambda: under_test.in_flight == 0, "the slot is free")


async def test_the_first_event_names_the_model_where_the_fleet_serves_several(backend: ScriptedBackend) -> None:
    async with RealtimeEngine("voxtral") as engine, running(backend, engine) as under_test:
        async with connect(under_test) as session:
            assert (await event(session))["type"] == "session.created"
            assert under_test.in_flight == 0
            await session.send(update("voxtral"))
            await session.send(APPEND)
            assert (await event(session))["type"] == "transcription.delta"
            assert under_test.in_flight == 1
            await session.send(FINAL)
            assert (await event(session))["text"] == "la"
        assert engine.sessions[0].kinds == ["session.update", "input_audio_buffer.append", "input_audio_buffer.commit"]
        async with connect(under_test) as session:
            await event(session)
            await session.send(update("absent"))
            failure = await event(session)
            assert (failure["type"], failure["code"]) == ("error", "model_not_found")
            assert "voxtral" in failure["error"]
            assert await close_code(session) == 1008


async def test_a_backend_that_dies_ends_the_session_with_an_error(backend: ScriptedBackend) -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test:
        async with speaking(under_test) as session:
            engine.cut(engine.sessions[0])
            assert (await event(session))["code"] == "stream_interrupted"
            assert await close_code(session) == 1011
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert under_test.outcomes == {"interrupted": 1}


async def test_a_client_that_dies_ends_the_session_on_the_backend() -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test:
        async with speaking(under_test) as session:
            session.transport.abort()
            await holds(lambda: not engine.open, "the backend's session has ended")
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert under_test.outcomes == {"client_gone": 1}


async def test_a_backend_that_closes_the_session_closes_the_clients() -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test:
        async with speaking(under_test) as session:
            await engine.sessions[0].socket.close(code=4001, message=b"enough")
            assert await close_code(session) == 4001
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert under_test.outcomes == {"completed": 1}


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"idle_timeout_seconds": 0.3}, "No data for 0.3 s."), ({"max_session_seconds": 0.3}, "limit of 0.3 s.")],
)
async def test_a_session_ends_at_its_limits(limit: dict[str, float], reason: str) -> None:
    async with RealtimeEngine() as engine, running(engine, sections={"realtime": limit}) as under_test:
        async with speaking(under_test) as session:
            failure = await event(session)
            assert (failure["type"], failure["code"]) == ("error", "session_expired")
            assert failure["error"].endswith(reason)
            assert await close_code(session) == 1001
        await holds(lambda: not engine.open, "the backend's session has ended")
        assert under_test.outcomes == {"session_expired": 1}


async def test_a_gateway_that_stops_closes_its_sessions() -> None:
    drains = {"server": {"drain_timeout_seconds": 0.2, "drain_delay_seconds": 0}}
    async with RealtimeEngine() as engine, running(engine, sections=drains) as under_test:
        async with speaking(under_test) as session:
            await under_test.gateway.server.drain()
            await session.send(APPEND)  # it may end what it has begun
            assert (await event(session))["type"] == "transcription.delta"
            cutting = asyncio.create_task(under_test.gateway.server._cut())
            assert (await event(session))["code"] == "shutting_down"
            assert await close_code(session) == 1001
            await cutting
        assert under_test.outcomes == {"cut_by_shutdown": 1}


async def test_a_slow_client_slows_the_backend_down_and_leaving_frees_the_slot() -> None:
    async with RealtimeEngine(delta="x" * 10000, endless=True) as engine, running(engine) as under_test:
        client = await under_test.client(receive_buffer_bytes=4096)
        await client.send(UPGRADE % (b"", b""))
        assert (await client.read()).startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        masked = bytes((0x81, 0x80 | len(COMMIT), 0, 0, 0, 0)) + COMMIT.encode()
        await client.send(masked)
        transport = engine.sessions[0].socket._req.transport  # type: ignore[union-attr]
        assert transport is not None
        await holds(lambda: transport.get_write_buffer_size() > 50000, "the backend cannot send more")
        client.reset()
        await holds(lambda: under_test.in_flight == 0, "the slot is free")


async def test_a_slow_backend_slows_the_client_down() -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test:
        engine.deaf.set()
        async with speaking(under_test) as session:
            flood = asyncio.create_task(send_for_ever(session))
            await holds(lambda: session.transport.get_write_buffer_size() > 0, "the client cannot send more")
            await asyncio.sleep(0.2)
            assert under_test.gateway.core.memory.used_bytes < 1048576
            flood.cancel()
            peer = session.transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a client that crashes
            session.transport.abort()
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        for each in engine.sessions:
            engine.cut(each)


@pytest.mark.parametrize(
    ("how", "protocol"),
    [
        ({"additional_headers": {"authorization": "Bearer sk-ann"}}, None),
        ({"subprotocols": ["realtime", "openai-insecure-api-key.sk-ann", "openai-beta.realtime-v1"]}, "realtime"),
    ],
)
async def test_a_key_is_accepted_in_a_header_and_among_the_protocols(how: dict[str, Any], protocol: str | None) -> None:
    async with RealtimeEngine() as engine, running(engine, sections=KEYS) as under_test:
        async with speaking(under_test, **how) as session:
            assert session.subprotocol == protocol
        assert "sec-websocket-protocol" not in engine.sessions[0].headers
        for wrong in ({}, {"subprotocols": ["realtime", "openai-insecure-api-key.sk-bob"]}):
            with pytest.raises(websockets.InvalidStatus) as caught:
                await connect(under_test, **wrong)
            assert caught.value.response.status_code == 401


async def test_a_key_opens_sessions_of_its_own_models_only() -> None:
    keys = {"auth": {"keys": [{"name": "ann", "key": "sk-ann", "models": ["other"]}]}}
    async with RealtimeEngine() as engine, running(engine, sections=keys) as under_test:
        with pytest.raises(websockets.InvalidStatus) as caught:
            await connect(under_test, additional_headers={"authorization": "Bearer sk-ann"})
        assert caught.value.response.status_code == 403
        assert engine.sessions == []


@pytest.mark.parametrize("query", ["", "?model=scripted", "?model=voice-1"])
async def test_a_session_keeps_the_model_that_it_began_with(query: str) -> None:
    keys = {"auth": {"keys": [{"name": "ann", "key": "sk-ann", "models": ["scripted", "voice-1", "spare"]}]}}
    sections: Any = keys | {"models": {"aliases": {"voice-1": "scripted"}}}
    headers = {"authorization": "Bearer sk-ann"}
    async with RealtimeEngine() as engine, running(engine, sections=sections) as under_test:
        for name in ("spare", "absent"):
            async with connect(under_test, query, additional_headers=headers) as session:
                await event(session)
                await session.send(update("voice-1"))
                await session.send(APPEND)
                assert (await event(session))["type"] == "transcription.delta"
                await session.send([update(name)[:20], update(name)[20:]])  # in two frames
                assert (await event(session))["type"] == "error"
                assert await close_code(session) == 1008
            await holds(lambda: under_test.in_flight == 0, "the slot is free")
        kinds = [kind for each in engine.sessions for kind in each.kinds]
        assert kinds == ["session.update", "input_audio_buffer.append"] * 2


async def test_a_backend_without_the_realtime_api_is_a_clear_refusal(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for status in (403, 404, 405):
            backend.plays(answer(status, {"detail": "no"}))
            with pytest.raises(websockets.InvalidStatus) as caught:
                await connect(under_test)
            assert caught.value.response.status_code == 404
            assert json.loads(caught.value.response.body)["error"]["code"] == "endpoint_not_offered"
            assert backend.ledger[-1].header(b"sec-websocket-key") is not None


async def test_a_backend_that_cannot_be_reached_is_replaced_by_another() -> None:
    async with RealtimeEngine() as gone, RealtimeEngine() as engine, running(gone, engine) as under_test:
        await gone.stop()
        for _ in range(3):
            async with speaking(under_test):
                assert len(engine.open) == 1
            await holds(lambda: not engine.open, "the session has ended")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /v1/realtime HTTP/1.1\r\nhost: a\r\n\r\n", 426, "websocket_required"),
        (UPGRADE.replace(b"version: 13", b"version: 8") % (b"", b""), 426, "websocket_required"),
        (UPGRADE.replace(b"dGhl", b"short") % (b"", b""), 400, None),
        (UPGRADE.replace(b"websocket", b"h2c", 1) % (b"", b""), 426, "websocket_required"),
        (UPGRADE % (b"", b"") + b"\x81\x80", 400, None),
        (UPGRADE % (b"", b"origin: https://evil.example\r\n"), 403, "origin_not_allowed"),
        (UPGRADE.replace(b"GET", b"POST") % (b"", b""), 405, "method_not_allowed"),
    ],
)
async def test_what_is_no_upgrade_to_a_session_is_refused(sent: bytes, status: int, code: str | None) -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test:
        async with await under_test.client() as client:
            await client.send(sent)
            refused = await client.answer()
        assert (refused.status, refused.error["code"]) == (status, code)
        assert engine.sessions == []


async def test_a_page_of_the_gateways_own_host_may_connect() -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test, await under_test.client() as client:
        await client.send(UPGRADE % (b"", b"origin: http://gateway\r\n"))
        assert (await client.read()).startswith(b"HTTP/1.1 101 ")
        await holds(lambda: len(engine.sessions) == 1, "the session is open")
        await client.send(b"\xff\xff\xff\xff")  # the backend finds the mistake, and closes
        assert isinstance(await client.end(), EndOfConnection)
