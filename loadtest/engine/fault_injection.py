"""Scripted faults before an answer, in place of it, and inside its stream."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from loadtest.engine.api.errors import ApiError, engine_dead
from loadtest.engine.api.exchange import EventStream, break_connection, error_answer
from loadtest.engine.faults import Script
from loadtest.engine.ledger import LedgerEntry


class StreamFaults:
    """Decides how many tokens may be sent, and strikes when the scripted one was."""

    def __init__(self, entry: LedgerEntry, script: Script, stream: EventStream, *, resume: Callable[[], None]) -> None:
        self._entry = entry
        self._script = script
        self._stream = stream
        self._resume = resume
        self._loop = asyncio.get_running_loop()
        self._started_seconds = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._garbage_sent = False
        self._struck = False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def allowance(self, sent_tokens: int, wanted_tokens: int) -> int:
        """How many of the wanted tokens may be sent now."""
        script = self._script
        if self._struck:
            return 0
        allowed = wanted_tokens
        for limit in (script.die_at_token, script.stall_at_token, script.error_at_token, script.garbage_at_token):
            if limit is not None and not (limit == script.garbage_at_token and self._garbage_sent):
                allowed = min(allowed, limit - sent_tokens)
        if script.tokens_per_second is not None:
            due = int((self._loop.time() - self._started_seconds) * script.tokens_per_second) + 1 - sent_tokens
            if due < wanted_tokens:
                self._arm(sent_tokens + max(due, 0) + 1)
            allowed = min(allowed, due)
        return max(allowed, 0)

    def after_send(self, sent_tokens: int, fail: Callable[[Exception], None]) -> None:
        """Strike if the scripted token was reached."""
        script = self._script
        if self._struck:
            return
        if script.garbage_at_token == sent_tokens and not self._garbage_sent:
            self._garbage_sent = True
            self._stream.write(b"data: {this is not JSON\n\n")
            self._loop.call_soon(self._resume)
        if script.die_at_token == sent_tokens:
            self._strike()
            self._stream.break_off(script.die_by)
        elif script.error_at_token == sent_tokens:
            self._strike()
            fail(engine_dead())
        elif script.stall_at_token == sent_tokens:
            self._struck = True

    def _strike(self) -> None:
        self._struck = True
        self._entry.strike()

    def _arm(self, token: int) -> None:
        assert self._script.tokens_per_second is not None
        if self._timer is not None:
            self._timer.cancel()
        due = self._started_seconds + (token - 1) / self._script.tokens_per_second
        self._timer = self._loop.call_at(due + 1e-4, self._resume)


async def play_opening(request: web.BaseRequest, entry: LedgerEntry, script: Script) -> web.StreamResponse | None:
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
    request: web.BaseRequest, entry: LedgerEntry, script: Script, answer: web.StreamResponse
) -> web.StreamResponse:
    """What becomes of an answer that is not streamed: a fault at any of its tokens takes all of it."""
    if script.die_at_token is not None or script.die_after_finish:
        await _die(request, entry, script.die_by)
    if script.stall_at_token is not None:
        await _until_the_client_leaves()
    if script.error_at_token is not None:
        entry.strike()
        return error_answer(engine_dead(), request.path)
    if script.garbage_at_token is not None and isinstance(answer, web.Response):
        answer.body = b'{"id": "garbage", "choices": [{{{'
    return answer


async def _die(request: web.BaseRequest, entry: LedgerEntry, by: str) -> None:
    entry.strike()
    break_connection(request, by)
    await _until_the_client_leaves()


async def _until_the_client_leaves() -> None:
    """Ends with CancelledError, when the connection is lost."""
    await asyncio.Event().wait()
