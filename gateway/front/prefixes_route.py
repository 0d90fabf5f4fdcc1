"""`GET /admin/prefixes`: the prefix report, made beside the event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

Breathe = Callable[[], None]
Making = Callable[[Breathe], dict[str, Any]]
_WORK_SECONDS = 0.001  # at a stretch, before the event loop is let in
_REST_SECONDS = 0.001


def add_prefix_routes(app: web.Application, prepare: Callable[[float | None], Making] | None) -> None:
    """Serve the report. `prepare` takes a snapshot of the last so many seconds (None = all that is kept), on the event
    loop; what it gives back is called in a thread. Without `prepare` the report is switched off: 404.
    """
    one_at_a_time = asyncio.Lock()

    async def show(request: web.Request) -> web.Response:
        if prepare is None:
            return _answer({"error": "The prefix report is switched off (prefix_report.enabled)."}, 404)
        try:
            minutes = float(request.query.get("minutes", "0"))
        except ValueError:
            minutes = -1.0
        if not 0 <= minutes < 1e6:
            return _answer({"error": "minutes must be a number of at least 0."}, 400)
        async with one_at_a_time:
            document = await asyncio.to_thread(prepare(minutes * 60 or None), Breather())
        return _answer(document)

    app.router.add_get("/admin/prefixes", show)


class Breather:
    """Lets other threads run now and then: the interpreter alone would let the event loop wait 5 ms at every turn."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._since = clock()

    def __call__(self) -> None:
        """Rest, if it has been a while."""
        if self._clock() - self._since >= _WORK_SECONDS:
            self._sleep(_REST_SECONDS)
            self._since = self._clock()


def _answer(document: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
