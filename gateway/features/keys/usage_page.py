"""`GET /admin/usage`: usage of each API key, by model, from one day to another."""

import asyncio
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

from aiohttp import web

from gateway.core.errors import InvalidRequest
from gateway.core.threads import Threads
from gateway.features.keys.usage import COUNTS, State, totals
from gateway.features.operate.admin_http import as_json

_EPOCH = date(1970, 1, 1)


class UsagePage:
    """Serves the usage. `read` returns all counts, which are summed up in a thread, one request at a time.

    `last_days`: the last day on which each key was used.
    """

    def __init__(
        self, read: Callable[[], State], last_days: Callable[[], dict[str, int]], unix_seconds: Callable[[], float]
    ) -> None:
        self._read = read
        self._last_days = last_days
        self._unix_seconds = unix_seconds
        self._one_at_a_time, self._threads = asyncio.Lock(), Threads("usage")

    def routes(self) -> list[web.RouteDef]:
        """Its routes on the admin port."""
        return [web.get("/admin/usage", self._usage)]

    async def _usage(self, request: web.Request) -> web.Response:
        today = datetime.fromtimestamp(self._unix_seconds(), UTC).date()
        since = _day_of(request, "since", today.replace(day=1))
        until = _day_of(request, "until", today)
        by_day = request.query.get("by", "") == "day"
        async with self._one_at_a_time:
            document = await self._threads.run(usage_document, self._read(), since, until, by_day=by_day)
        return as_json(document | {"last_used": {key: _name_of(day) for key, day in self._last_days().items()}})


def usage_document(state: State, since: date, until: date, *, by_day: bool) -> dict[str, Any]:
    """The rows and their sum; each row has its day if they are `by_day`."""
    rows = totals(state, (since - _EPOCH).days, (until - _EPOCH).days, by_day=by_day)
    first = min(state["past"], default=state["day"])
    shown = [
        ({"day": _name_of(day)} if by_day else {})
        | {"key": key, "model": model}
        | dict(zip(COUNTS, counts, strict=True))
        for day, key, model, counts in rows
    ]
    sums = [sum(counts[place] for *_, counts in rows) for place in range(len(COUNTS))]
    return {
        "since": since.isoformat(),
        "until": until.isoformat(),
        "counted_since": _name_of(first),
        "rows": shown,
        "total": dict(zip(COUNTS, sums, strict=True)),
    }


def _day_of(request: web.Request, name: str, otherwise: date) -> date:
    """The day that a parameter names. Raises InvalidRequest."""
    if (text := request.query.get(name)) is None:
        return otherwise
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"The parameter {name} must be a date such as 2027-01-31.", param=name) from None


def _name_of(day: int) -> str:
    return (_EPOCH + timedelta(day)).isoformat()
