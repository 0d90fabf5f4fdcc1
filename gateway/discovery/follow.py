"""Keeps the fleet like its sources: reads them again and again, and passes on what they list."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

import structlog

from gateway.backends.fleet import FleetChanges, Wanted
from gateway.backends.membership import Membership
from gateway.config import BackendConfig, DiscoveryConfig
from gateway.discovery.sources import BackendSource, DiscoveryError, configured_sources
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
        self._is_wanted = True

    def stop(self) -> None:
        """Pass on nothing from now on."""
        self._is_wanted = False

    async def run(self, supervisor: Supervisor) -> None:
        """Follow the source until this is cancelled."""
        async with supervisor.repeating("discovery", self.step, _RETRY_SECONDS):
            await asyncio.Event().wait()

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
            if listed != self._listed and self._is_wanted:
                self._listed = listed
                changes = self._follow(self._source.name, [Wanted(each) for each in listed])
                log.info("discovered", source=self._source.name, added=changes.added, removed=changes.removed)
        await asyncio.sleep(seconds)


class Discovery:
    """Follows all configured sources inside its `async with` block."""

    def __init__(self, config: DiscoveryConfig, membership: Membership, supervisor: Supervisor) -> None:
        self._membership = membership
        self._supervisor = supervisor
        self._sources = configured_sources(config)
        self._following: dict[BackendSource, tuple[SourceFollower, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sources = []
        self._end()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def follow(self, config: DiscoveryConfig) -> None:
        """Follow other sources. Those that stay are not disturbed, and the backends of one that goes leave."""
        self._sources = configured_sources(config)
        self._end()
        self._begin()
        self._membership.keep_sources(source.name for source in self._sources)

    def _begin(self) -> None:
        for source in self._sources:
            if source not in self._following:
                follower = SourceFollower(source, self._membership.follow)
                task = asyncio.get_running_loop().create_task(follower.run(self._supervisor), name="discovery")
                self._following[source] = follower, task

    def _end(self) -> None:
        for source in [each for each in self._following if each not in self._sources]:
            follower, task = self._following.pop(source)
            follower.stop()
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
