"""How many requests have reached each engine, by its own page, a few times a second."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from loadtest.drive.pages import page_values

_EVERY_SECONDS = 0.25
_TIMEOUT = aiohttp.ClientTimeout(total=1.0)
_ENDED = re.compile(r"^http_requests_total(\{[^}]*\}) (\S+)", re.MULTILINE)
# An engine has its share again once it gets half of what it got before: routers that follow prefixes share unevenly.
_OF_ITS_SHARE = 0.5
_WINDOW_SECONDS = 2.0
_FEWEST = 3


def reached(page: str) -> float:
    """Requests that have reached an engine: those that ended in whatever way, and those that it holds."""
    ended = sum(
        float(value)
        for labels, value in _ENDED.findall(page)
        if 'method="POST"' in labels and 'handler="/v1/' in labels
    )
    held = page_values(page)
    return ended + held.get("running", 0.0) + held.get("waiting", 0.0)


@dataclass(slots=True)
class Reached:
    """What the engines said, by time; None where one said nothing."""

    at: list[float] = field(default_factory=list)
    counts: list[tuple[float | None, ...]] = field(default_factory=list)

    def arrivals(self) -> list[tuple[float, ...]]:
        """By engine, how many came since the look before; an engine that was started again counts from zero."""
        rows: list[tuple[float, ...]] = []
        last: dict[int, float] = {}
        missed: set[int] = set()
        for counts in self.counts:
            row = [0.0] * len(counts)
            for number, count in enumerate(counts):
                if count is None:
                    missed.add(number)
                    continue
                # A request that ends is for a moment neither held nor ended: only far less than before is a new start.
                is_new = number in missed and count < last.get(number, 0.0) / 2
                row[number] = count - (0.0 if is_new else last.get(number, count))
                last[number] = count
                missed.discard(number)
            rows.append(tuple(row))
        return rows

    def total(self) -> float:
        """Requests that reached any engine between the first look and the last."""
        return sum(map(sum, self.arrivals()))


def back_in_share_seconds(seen: Reached, engine: int, gone: float, serving: float) -> float | None:
    """How long after an engine served again it got half of its earlier share of requests; None: not in this run."""
    rows = list(zip(seen.at, seen.arrivals(), strict=True))
    before = _share([row for at, row in rows if at <= gone], engine)
    if not before:
        return None
    for start, _ in rows:
        if start < serving:
            continue
        window = [row for at, row in rows if start < at <= start + _WINDOW_SECONDS]
        if start + _WINDOW_SECONDS > rows[-1][0] or sum(map(sum, window)) < _FEWEST:
            continue
        if (_share(window, engine) or 0.0) >= _OF_ITS_SHARE * before:
            return start - serving
    return None


def _share(rows: Sequence[tuple[float, ...]], engine: int) -> float | None:
    whole = sum(map(sum, rows))
    return sum(row[engine] for row in rows) / whole if whole else None


class Watch:
    """Looks at the engines' pages, by `clock`."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], clock: Callable[[], float]) -> None:
        self._session = session
        self._urls = urls
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self.seen = Reached()

    async def look(self) -> None:
        async with self._one_at_a_time:
            counts = await asyncio.gather(*map(self._reached, self._urls))
            self.seen.at.append(self._clock())
            self.seen.counts.append(tuple(counts))

    async def go_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_EVERY_SECONDS)

    async def _reached(self, url: str) -> float | None:
        try:
            async with self._session.get(f"{url}/metrics", timeout=_TIMEOUT) as response:
                return reached(await response.text())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
