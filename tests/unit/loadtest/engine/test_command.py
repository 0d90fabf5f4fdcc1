"""`loadtest sim` as a process."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp


@asynccontextmanager
async def simulated(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A running process and its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "sim", "--port", "0", *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield process, found.group()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stream_and_terminate(*flags: str, max_tokens: int) -> bytes:
    """What a stream gets when its engine is reported to stop."""
    body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with simulated("--time-scale", "1", *flags) as (process, url), aiohttp.ClientSession() as http:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            received = await answer.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            received += await answer.content.read()
        async with asyncio.timeout(5):
            assert await process.wait() == 0
    return received


async def test_sigterm_fails_what_is_under_way() -> None:
    received = await stream_and_terminate(max_tokens=5000)
    assert b'data: {"error": {"message": "EngineCore' in received
    assert received.endswith(b"data: [DONE]\n\n")


async def test_sigterm_lets_requests_end_if_so_configured() -> None:
    received = await stream_and_terminate("--shutdown-timeout", "10", max_tokens=40)
    assert b'"finish_reason":"length"' in received
    assert received.endswith(b"data: [DONE]\n\n")


async def test_ranks_and_kv_events_are_set_by_flags() -> None:
    flags = ("--data-parallel-size", "2", "--kv-events-endpoint", "tcp://*:0", "--kv-events-topic", "kv@x")
    more = ("--kv-events-replay-endpoint", "tcp://*:0", "--kv-events-buffer-steps", "7")
    async with (
        simulated(*flags, *more, "--kv-events-encoding", "array") as (_, url),
        aiohttp.ClientSession() as http,
        http.get(f"{url}/kv_event_sources") as answer,
    ):
        sources = await answer.json()
    assert [*sources] == ["0", "1"]
    for source in sources.values():
        assert (source["topic"], source["buffer_steps"]) == ("kv@x", 7)
        assert source["replay_endpoint"].startswith("tcp://127.0.0.1:")


async def test_impossible_limits_are_a_usage_error() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "sim", "--port", "0", "--max-num-seqs", "9000", stderr=asyncio.subprocess.PIPE
    )
    _, problem = await process.communicate()
    assert process.returncode == 2
    assert b"max_num_batched_tokens" in problem
