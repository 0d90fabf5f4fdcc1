"""Keeps the fleet like its sources: reads them again and again, and passes on what they list."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from gateway.backends.fleet import FleetChanges, Wanted
from gateway.config import BackendConfig
from gateway.discovery.sources import BackendSource, DiscoveryError
from gateway.supervisor import Supervisor

_RETRY_SECONDS = 2.0

log = structlog.get_logger("gateway")


class SourceFollower:
    """Follows one source. `follow` is `Membership.follow`."""

    def __init__(self, source: BackendSource, follow: Callable[[str, Sequence[Wanted]], FleetChanges]) -> None:
        self._source = source
        self._follow = follow
        self._listed: Sequence[BackendConfig] | None = None
        self._complaint = ""

    async def step(self) -> None:
        """Read the source once, apply what has changed, and wait until it is time again."""
        seconds = _RETRY_SECONDS
        try:
            listed, seconds = await self._source.read()
        except DiscoveryError as error:
            if str(error) != self._complaint:  # once for each reason
                self._complaint = str(error)
                log.warning("discovery_failed", source=self._source.name, reason=self._complaint)
        else:
            self._complaint = ""
            if listed != self._listed:
                self._listed = listed
                changes = self._follow(self._source.name, [Wanted(each) for each in listed])
                log.info("discovered", source=self._source.name, added=changes.added, removed=changes.removed)
        await asyncio.sleep(seconds)


@asynccontextmanager
async def following(
    sources: Sequence[BackendSource], follow: Callable[[str, Sequence[Wanted]], FleetChanges], supervisor: Supervisor
) -> AsyncIterator[None]:
    """Follow all sources while the block runs."""
    async with AsyncExitStack() as stack:
        for source in sources:
            step = SourceFollower(source, follow).step
            await stack.enter_async_context(supervisor.repeating("discovery", step, _RETRY_SECONDS))
        yield
