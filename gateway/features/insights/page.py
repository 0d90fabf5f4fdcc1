"""`GET /admin/prefixes`: the report on prefix reuse."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from gateway.core.threads import Threads, breather
from gateway.features.insights.families import Breathe
from gateway.features.operate.admin_http import as_json


class PrefixPage:
    """Serves the report. It may take seconds: it is made in a thread, one at a time, by the function that `prepare`
    returns for the last seconds (None = all samples). Without a function, the report is disabled: 404."""

    def __init__(self, prepare: Callable[[float | None], Callable[[Breathe], dict[str, Any]] | None]) -> None:
        self._prepare = prepare
        self._reporting, self._threads = asyncio.Lock(), Threads("prefix_report")

    def routes(self) -> list[web.RouteDef]:
        """Its routes on the admin port."""
        return [web.get("/admin/prefixes", self._prefixes)]

    async def _prefixes(self, request: web.Request) -> web.Response:
        try:
            minutes = float(request.query.get("minutes", "0"))
        except ValueError:
            minutes = -1.0
        if not 0 <= minutes < 1e6:
            return as_json({"error": "The parameter minutes must be a number of at least 0."}, 400)
        async with self._reporting:
            make = self._prepare(minutes * 60 or None)
            if make is None:
                return as_json({"error": "The prefix report is disabled: set prefix_report.enabled to true."}, 404)
            return as_json(await self._threads.run(make, breather()))
