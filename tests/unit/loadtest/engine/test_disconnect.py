"""A client that goes away frees its slots and blocks at once."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadtest.engine import EngineConfig, Limits, SimulatedEngine
from tests.unit.loadtest.engine.support import eventually, idle

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def asked(engine: SimulatedEngine, **fields: object) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which one long chat was asked for; closed on leaving."""
    body = json.dumps(
        {"model": "sim", "messages": [{"role": "user", "content": "long"}], "max_tokens": 2000, "ignore_eos": True}
        | fields
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    try:
        yield reader
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_request_is_aborted(slow_engine: SimulatedEngine, stream: bool) -> None:
    scheduler = slow_engine.service.engine.ranks[0].scheduler
    async with asked(slow_engine, stream=stream):
        await eventually(lambda: scheduler.num_running == 1)
        await eventually(lambda: scheduler.counters.generation_tokens > 2)
    await eventually(lambda: idle(slow_engine))
    assert slow_engine.service.ledger.endings["aborted"] == 1
    assert slow_engine.service.engine.ranks[0].stats.finished["abort"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_queued_request_is_aborted(slow_engine: SimulatedEngine, stream: bool) -> None:
    scheduler = slow_engine.service.engine.ranks[0].scheduler
    async with asked(slow_engine, n=8):
        await eventually(lambda: scheduler.num_running == 8)
        async with asked(slow_engine, stream=stream):
            await eventually(lambda: scheduler.num_waiting == 1)
        await eventually(lambda: scheduler.num_waiting == 0)
        assert scheduler.num_running == 8
    await eventually(lambda: idle(slow_engine))


async def test_all_choices_of_a_stream_are_aborted(slow_engine: SimulatedEngine) -> None:
    async with asked(slow_engine, n=5, stream=True) as reader:
        await reader.readuntil(b'"index":4')
        assert slow_engine.service.engine.ranks[0].scheduler.num_running == 5
    await eventually(lambda: idle(slow_engine))


async def test_a_hundred_clients_that_leave_at_any_time_leave_nothing_behind(slow_engine: SimulatedEngine) -> None:
    async def visit(number: int) -> None:
        async with asked(slow_engine, stream=number % 2 == 0, n=1 + number % 3):
            await asyncio.sleep(number / 1000)

    await asyncio.gather(*[visit(number) for number in range(100)])
    await eventually(lambda: idle(slow_engine))
    assert slow_engine.service.ledger.total == sum(slow_engine.service.ledger.endings.values())


async def test_a_slow_reader_gets_fewer_events_and_the_whole_text() -> None:
    config = EngineConfig(limits=Limits(num_blocks=10_000), time_scale=0, control=True)
    async with SimulatedEngine(config) as engine, asked(engine, stream=True, max_tokens=60_000) as reader:
        transport = reader._transport  # type: ignore[attr-defined]
        transport.pause_reading()
        await eventually(lambda: engine.service.engine.ranks[0].scheduler.counters.generation_tokens >= 60_000)
        transport.resume_reading()
        raw = bytearray()
        while not raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raw += await reader.read(1 << 20)
        deltas = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
        texts = [chunk["choices"][0]["delta"]["content"] for chunk in deltas]
        assert sum(map(len, texts)) == 4 * 60_000
        assert len(texts) < 30_000
        assert deltas[-1]["choices"][0]["finish_reason"] == "length"
    await eventually(lambda: idle(engine))
