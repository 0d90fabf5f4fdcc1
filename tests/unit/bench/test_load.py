"""The load generator counts what ends well, and calls everything else an error of the right kind."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.bench.measure import parse_load
from tests.bench.place import Place
from tests.bench.results import Load

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"t0000000000000000001"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """DATA as one chunk of a body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.fixture
def bodies(tmp_path: Path) -> Path:
    path = tmp_path / "bodies.jsonl"
    path.write_text("".join(json.dumps({"model": "mock", "messages": [], "user": str(n)}) + "\n" for n in range(3)))
    return path


async def load(place: Place, bodies: Path, port: int, *options: str) -> Load:
    """Run the load generator to its end."""
    command = [str(place.load), "--port", str(port), "--bodies", str(bodies), "--warmup", "0", *options]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(20):
        out, said = await process.communicate()
    assert said.split() == [b"open", b"shut"]
    found = parse_load(out.decode())
    assert process.returncode == (3 if found.error_count else 0)
    return found


@asynccontextmanager
async def scripted(answers: list[bytes], *, close: bool = True) -> AsyncIterator[int]:
    """A server that answers every request with these bytes, piece by piece, then closes; gives its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
                for piece in answers:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_plain_requests_are_all_completed_and_timed(tools: Place, engine_port: int, bodies: Path) -> None:
    found = await load(tools, bodies, engine_port, "--requests", "200", "--connections", "4")
    assert (found.all_requests, found.error_count, found.events) == (200, 0, 0)
    assert found.latency_us.n == found.requests == 200
    assert 0 < found.latency_us.p50 <= found.latency_us.p99 <= found.latency_us.max


async def test_streams_are_checked_and_timed_event_by_event(tools: Place, engine_port: int, bodies: Path) -> None:
    found = await load(tools, bodies, engine_port, "--requests", "10", "--stream", "--events", "7")
    assert (found.requests, found.events, found.error_count) == (10, 70, 0)
    assert (found.ttft_us.n, found.gap_us.n, found.relay_us.n) == (10, 60, 70)
    assert found.reconnects == 0


async def test_added_ttft_leaves_out_the_time_the_engine_held_the_request(
    tools: Place, engine_port: int, bodies: Path
) -> None:
    options = ["--requests", "5", "--stream", "--events", "2", "--pace-ms", "50"]
    found = await load(tools, bodies, engine_port, *options)
    assert found.ttft_us.p50 >= 50_000
    assert found.ttft_added_us.p50 < found.ttft_us.p50 - 49_000


async def test_the_window_shuts_and_what_is_in_flight_ends_well(tools: Place, engine_port: int, bodies: Path) -> None:
    options = ["--seconds", "0.3", "--connections", "20", "--stream", "--events", "10", "--pace-ms", "20"]
    found = await load(tools, bodies, engine_port, *options)
    assert found.error_count == 0
    assert found.seconds == pytest.approx(0.3, abs=0.5)
    assert found.in_flight == pytest.approx(20, abs=2)
    assert found.all_requests >= found.requests + 20


async def test_events_that_are_cut_anywhere_are_counted_once(tools: Place, bodies: Path) -> None:
    stream = HEAD + chunk(EVENT[:30]) + chunk(EVENT[30:] + EVENT) + chunk(DONE) + b"0\r\n\r\n"
    async with scripted([stream[i : i + 5] for i in range(0, len(stream), 5)], close=False) as port:
        found = await load(tools, bodies, port, "--requests", "3", "--stream", "--events", "2")
    assert (found.all_requests, found.events, found.error_count) == (3, 6, 0)


async def test_an_interim_answer_is_skipped(tools: Place, bodies: Path) -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    async with scripted([answer], close=False) as port:
        found = await load(tools, bodies, port, "--requests", "3")
    assert (found.all_requests, found.error_count) == (3, 0)


async def test_a_body_that_ends_with_the_connection_is_complete(tools: Place, bodies: Path) -> None:
    async with scripted([b"HTTP/1.1 200 OK\r\n\r\n", b"{}"]) as port:
        found = await load(tools, bodies, port, "--requests", "3")
    assert (found.all_requests, found.error_count, found.reconnects) == (3, 0, 3)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("status", b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"),
        ("truncated", HEAD + chunk(EVENT) + chunk(EVENT) + b"0\r\n\r\n"),
        ("miscounted", HEAD + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"),
        ("lost", HEAD + chunk(EVENT) + chunk(EVENT) + chunk(DONE)),
        ("lost", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort"),
        ("lost", HEAD + b"not a chunk\r\n"),
        ("lost", b""),
    ],
)
async def test_what_ends_badly_is_an_error_of_its_kind(tools: Place, bodies: Path, kind: str, answer: bytes) -> None:
    async with scripted([answer], close=kind == "lost") as port:
        found = await load(tools, bodies, port, "--requests", "2", "--stream", "--events", "2")
    assert found.errors[kind] == found.error_count == 2
    assert found.first_error.startswith(kind)
    assert found.all_requests == 0


async def test_a_refusal_is_counted_apart_where_refused_clients_rest(tools: Place, bodies: Path) -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"
    async with scripted([refusal], close=False) as port:
        found = await load(tools, bodies, port, "--seconds", "0.5", "--connections", "4", "--refused-pause-ms", "50")
    assert (found.error_count, found.requests, found.reconnects) == (0, 0, 0)
    assert 20 <= found.refused <= 44
    assert found.refusal_us.n == found.refused
    assert 0 < found.refusal_us.p50 < 50_000


async def test_a_refused_connection_is_an_error(tools: Place, bodies: Path) -> None:
    async with scripted([]) as port:
        pass
    found = await load(tools, bodies, port, "--requests", "3")
    assert found.errors["connect"] == found.error_count == 3
