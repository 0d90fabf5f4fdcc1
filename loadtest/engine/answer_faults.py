"""Scripted faults around an answer: before its headers, or in place of a whole one."""

import asyncio

from aiohttp import web

from loadtest.engine.api.errors import ApiError, engine_dead
from loadtest.engine.api.exchange import error_answer
from loadtest.engine.event_stream import break_connection
from loadtest.engine.faults import Script
from loadtest.engine.ledger import Entry


async def play_opening(request: web.BaseRequest, entry: Entry, script: Script) -> web.StreamResponse | None:
    """What comes before any answer; an answer that comes instead of one."""
    if script.headers_delay_seconds:
        await asyncio.sleep(script.headers_delay_seconds)
    if script.hang:
        await request.read()
        await _until_the_client_leaves()
    if script.die_before_headers is not None:
        await request.read()
        await _die(request, entry, script.die_before_headers)
    if script.status is None:
        return None
    await request.read()
    headers = {"Retry-After": script.retry_after} if script.retry_after is not None else {}
    return error_answer(ApiError(script.status, script.message, "InternalServerError", headers=headers), request.path)


async def play_whole(
    request: web.BaseRequest, entry: Entry, script: Script, answer: web.StreamResponse
) -> web.StreamResponse:
    """What becomes of an answer that is not streamed: a fault at any of its tokens takes all of it."""
    if script.die_at_token is not None or script.die_after_finish:
        await _die(request, entry, script.die_by)
    if script.stall_at_token is not None:
        await _until_the_client_leaves()
    if script.error_at_token is not None:
        entry.struck = True
        return error_answer(engine_dead(), request.path)
    if script.garbage_at_token is not None and isinstance(answer, web.Response):
        answer.body = b'{"id": "garbage", "choices": [{{{'
    return answer


async def _die(request: web.BaseRequest, entry: Entry, by: str) -> None:
    entry.struck = True
    break_connection(request, by)
    await _until_the_client_leaves()


async def _until_the_client_leaves() -> None:
    """Ends with CancelledError, when the connection is lost."""
    await asyncio.Event().wait()
