"""Pages that watch a gateway while it is replaced or stops, that never read, and that leave."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import orjson

from gateway.features.page.broadcast import MOST_WATCHERS
from tests.clients import chat
from tests.fault.restartable import restartable
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import json_answer

STREAM = "/admin/dashboard/stream"


async def first_event(answer: aiohttp.ClientResponse) -> str:
    """The kind of the next event; its document is JSON."""
    kind, data, *_ = (await answer.content.readuntil(b"\n\n")).split(b"\n")
    orjson.loads(data.removeprefix(b"data: "))
    return kind.decode().removeprefix("event: ")


async def test_a_page_follows_when_a_new_process_takes_over(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with restartable(tmp_path, backend) as gateway, aiohttp.ClientSession() as session:
        url, old = f"http://127.0.0.1:{gateway.admin_port}{STREAM}", gateway.processes[0].pid
        async with session.get(url) as watched:
            assert await first_event(watched) == "full"
            await gateway.restart()
            async with asyncio.timeout(20):
                await watched.content.read()  # to its end
        await gateway.ended(old)
        async with session.get(url) as watched:
            assert await first_event(watched) == "full"
            assert await first_event(watched) == "tick"


async def test_an_open_page_does_not_delay_the_end(tmp_path: Path, backend: ScriptedBackend) -> None:
    async with (
        restartable(tmp_path, backend) as gateway,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{gateway.admin_port}{STREAM}") as watched,
    ):
        assert await first_event(watched) == "full"
        gateway.processes[0].send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            await watched.content.read()
            assert await asyncio.to_thread(gateway.processes[0].wait, 20) == 0


async def test_watchers_that_never_read_harm_nobody_and_leave_no_trace(backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with (
        running(backend, sections={"server": {"admin": {"port": 0}}}) as under_test,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{under_test.admin_port}{STREAM}"
        async with AsyncExitStack() as stack:
            for _ in range(MOST_WATCHERS):
                await stack.enter_async_context(session.get(url))
            async with session.get(url) as refused:
                assert refused.status == 429
                assert "16 pages watch" in await refused.text()
            assert (await under_test.ask(chat())).status == 200
        stream = under_test.gateway.operators.dashboard
        await holds(lambda: stream.watchers == 0, "nobody watches")
        async with session.get(url) as watched:
            assert await first_event(watched) == "full"
