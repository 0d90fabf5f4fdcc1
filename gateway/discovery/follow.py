"""Keeps the fleet like its sources: what each lists is applied whenever it changes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from random import Random

import structlog

from gateway.backends.fleet import FleetChanges, Wanted
from gateway.discovery.listings import BackendSource, DiscoveryError, Listing
from gateway.supervisor import Supervisor

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 10.0  # before a source that failed is started again; doubles

Follow = Callable[[str, Sequence[Wanted]], FleetChanges]

log = structlog.get_logger("gateway")


class SourceFollower:
    """Follows one source. `follow` is `Membership.follow`."""

    def __init__(self, source: BackendSource, follow: Follow, random: Random) -> None:
        self._source = source
        self._follow = follow
        self._random = random
        self._listed: tuple[Wanted, ...] | None = None
        self._complaint = ""
        self._retry_seconds = _LEAST_RETRY_SECONDS

    async def step(self) -> None:
        """Apply what the source lists until it fails, and wait before it is started again."""
        try:
            async with aclosing(self._source.listings()) as listings:
                async for listing in listings:
                    self._retry_seconds = _LEAST_RETRY_SECONDS
                    self._apply(listing)
        except DiscoveryError as error:
            self._complain(str(error))
        await asyncio.sleep(self._retry_seconds * self._random.uniform(0.5, 1.0))
        self._retry_seconds = min(_MOST_RETRY_SECONDS, 2 * self._retry_seconds)

    def _apply(self, listing: Listing) -> None:
        self._complain(listing.problem)
        if listing.backends != self._listed:
            self._listed = listing.backends
            changes = self._follow(self._source.name, listing.backends)
            log.info("discovered", source=self._source.name, added=changes.added, removed=changes.removed)

    def _complain(self, reason: str) -> None:
        """Log what is wrong, once for each reason; empty = nothing is."""
        if reason not in ("", self._complaint):
            log.warning("discovery_failed", source=self._source.name, reason=reason)
        self._complaint = reason


@asynccontextmanager
async def following(
    sources: Sequence[BackendSource], follow: Follow, supervisor: Supervisor, random: Random
) -> AsyncIterator[None]:
    """Follow all sources while the block runs."""
    async with AsyncExitStack() as stack:
        for source in sources:
            step = SourceFollower(source, follow, random).step
            await stack.enter_async_context(supervisor.repeating("discovery", step, _MOST_RETRY_SECONDS))
        yield
