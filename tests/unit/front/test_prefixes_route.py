import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from gateway.config import Listen
from gateway.front.admin import admin_listening
from gateway.front.prefixes_route import Breather, Making, add_prefix_routes


@asynccontextmanager
async def serving(prepare: Callable[[float | None], Making] | None) -> AsyncIterator[str]:
    app = web.Application()
    add_prefix_routes(app, prepare)
    async with admin_listening(app, Listen(port=0)) as port:
        yield f"http://127.0.0.1:{port}/admin/prefixes"


async def ask(url: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.json()


async def test_a_snapshot_is_taken_on_the_loop_and_the_report_made_beside_it() -> None:
    loop_thread = threading.get_ident()
    seen: list[object] = []

    def prepare(window_seconds: float | None) -> Making:
        seen.append((window_seconds, threading.get_ident() == loop_thread))

        def make(breathe: Callable[[], None]) -> dict[str, Any]:
            breathe()
            seen.append(threading.get_ident() == loop_thread)
            return {"breakers": []}

        return make

    async with serving(prepare) as url:
        assert await ask(url) == (200, {"breakers": []})
        assert await ask(f"{url}?minutes=2.5") == (200, {"breakers": []})
    assert seen == [(None, True), False, (150.0, True), False]


async def test_reports_are_made_one_after_the_other() -> None:
    running = threading.Lock()

    def make(_: Callable[[], None]) -> dict[str, Any]:
        assert running.acquire(blocking=False)
        entered.set()
        proceed.wait(5)
        running.release()
        return {}

    entered, proceed = threading.Event(), threading.Event()
    async with serving(lambda _: make) as url, asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(url)) for _ in range(3)]
        await asyncio.to_thread(entered.wait, 5)
        proceed.set()
    assert [each.result() for each in asked] == [(200, {})] * 3


async def test_a_bad_number_of_minutes_is_refused() -> None:
    async with serving(lambda _: lambda _: {}) as url:
        for minutes in ("x", "-1", "nan", "inf"):
            assert await ask(f"{url}?minutes={minutes}") == (400, {"error": "minutes must be a number of at least 0."})


async def test_it_says_that_it_is_switched_off() -> None:
    async with serving(None) as url:
        assert await ask(url) == (404, {"error": "The prefix report is switched off (prefix_report.enabled)."})


def test_work_is_interrupted_by_rests() -> None:
    now, slept = [0.0], list[float]()
    breathe = Breather(lambda: now[0], slept.append)
    for _ in range(10):
        now[0] += 0.0004
        breathe()
    assert slept == [0.001] * 3
