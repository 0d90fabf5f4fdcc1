"""The interface of sources of backends: each yields all its backends, as listings.

A source yields once at the start, and then after each change, by polling or by notification. A failing source raises
DiscoveryError and is started again later; until then its last listing stands. Backends that are gone fail their probes,
and a resolver or an API server that is down stops no traffic.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from gateway.core.backends.fleet import Wanted


class DiscoveryError(Exception):
    """A source could not be read; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All backends that a source lists. `problem`: why it may list fewer than expected; empty = no problem."""

    backends: tuple[Wanted, ...]
    problem: str = ""


class BackendSource(Protocol):
    """One source. `name` is that of the backends' origin. Sources that list the same are equal."""

    name: str

    def listings(self) -> AsyncGenerator[Listing, None]:
        """Yields the backends at the start and whenever they may have changed. Raises DiscoveryError."""


async def polled(read: Callable[[], Awaitable[tuple[Listing, float]]]) -> AsyncGenerator[Listing, None]:
    """The listings of a polled source; `read` also returns the seconds until the next poll."""
    while True:
        listing, seconds = await read()
        yield listing
        await asyncio.sleep(seconds)


async def first_listing(source: BackendSource) -> Listing:
    """The current listing of a source. Raises DiscoveryError."""
    async with aclosing(source.listings()) as listings:
        return await anext(listings)
