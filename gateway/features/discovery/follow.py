"""Keeps the fleet equal to the configured sources: each listing is applied whenever it changes."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Self

import structlog

from gateway.core.backends.fleet import FleetChanges, Wanted
from gateway.core.backends.membership import Membership
from gateway.core.supervisor import Supervisor
from gateway.core.turns import Steps, in_turns
from gateway.features.discovery.listings import BackendSource, DiscoveryError, Listing
from gateway.features.discovery.settings import DiscoveryConfig
from gateway.features.discovery.sources import DnsName, WatchedFile

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 10.0  # before a source that failed is started again; doubles

Follow = Callable[[str, Sequence[Wanted]], Steps[FleetChanges]]

log = structlog.get_logger("gateway")


def configured_sources(config: DiscoveryConfig) -> list[BackendSource]:
    sources: list[BackendSource] = []
    if config.file is not None:
        sources.append(WatchedFile(Path(config.file)))
    sources += [DnsName(each, config.backend) for each in config.dns]
    if config.kubernetes:
        from gateway.features.discovery.kubernetes import KubernetesEndpoints  # of a package that few need, and 60 MiB

        sources += [KubernetesEndpoints(each, config.backend) for each in config.kubernetes]
    return sources


class SourceFollower:
    """Follows one source, up to `max_backends` of its backends. `reconcile` is `Membership.reconcile`."""

    def __init__(self, source: BackendSource, follow: Follow, random: Random, *, max_backends: int) -> None:
        self.max_backends = max_backends
        self._source = source
        self._follow = follow
        self._random = random
        self._listed: tuple[Wanted, ...] | None = None
        self._complaint = ""
        self._retry_seconds = _LEAST_RETRY_SECONDS
        self._is_wanted = True

    def stop(self) -> None:
        """Pass on nothing from now on."""
        self._is_wanted = False

    async def run(self, supervisor: Supervisor) -> None:
        """Follow the source until this is cancelled."""
        async with supervisor.repeating("discovery", self.step, _MOST_RETRY_SECONDS):
            await asyncio.Event().wait()

    async def step(self) -> None:
        """Apply the source's listings until it fails, and wait before it is started again."""
        try:
            async with aclosing(self._source.listings()) as listings:
                async for listing in listings:
                    self._retry_seconds = _LEAST_RETRY_SECONDS
                    await self._apply(listing)
        except DiscoveryError as error:
            self._complain(str(error))
        await asyncio.sleep(self._retry_seconds * self._random.uniform(0.5, 1.0))
        self._retry_seconds = min(_MOST_RETRY_SECONDS, 2 * self._retry_seconds)

    async def _apply(self, listing: Listing) -> None:
        problem, count, most = listing.problem, len(listing.backends), self.max_backends
        if count > most:
            problem = f"{count} backends are listed; only the first {most} are used. Raise discovery.max_backends."
        self._complain(problem)
        listed = listing.backends[:most]
        if listed != self._listed and self._is_wanted:
            changes = await in_turns(self._follow(self._source.name, listed))
            self._listed = listed
            log.info("discovered", source=self._source.name, added=changes.added, removed=changes.removed)

    def _complain(self, reason: str) -> None:
        """Log a problem, once for each reason; empty = none."""
        if reason not in ("", self._complaint):
            log.warning("discovery_failed", source=self._source.name, reason=reason)
        self._complaint = reason


class Discovery:
    """Follows all configured sources inside its `async with` block."""

    def __init__(
        self, config: DiscoveryConfig, membership: Membership, supervisor: Supervisor, *, random: Random
    ) -> None:
        self._membership = membership
        self._supervisor = supervisor
        self._random = random
        self._sources = configured_sources(config)
        self._max_backends = config.max_backends
        self._following: dict[BackendSource, tuple[SourceFollower, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """The names of the sources, which are the origins of their backends."""
        return [source.name for source in self._sources]

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sources = []
        self._end()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def apply(self, config: DiscoveryConfig) -> None:
        """Take over other sources. Remaining sources are not disturbed, and the backends of removed sources leave."""
        self._sources, self._max_backends = configured_sources(config), config.max_backends
        self._end()
        self._begin()
        self._membership.keep_sources(self.names)

    def _begin(self) -> None:
        for source in self._sources:
            if source in self._following:
                self._following[source][0].max_backends = self._max_backends
            else:
                follower = SourceFollower(
                    source, self._membership.reconcile, self._random, max_backends=self._max_backends
                )
                task = asyncio.get_running_loop().create_task(follower.run(self._supervisor), name="discovery")
                self._following[source] = follower, task

    def _end(self) -> None:
        for source in [each for each in self._following if each not in self._sources]:
            follower, task = self._following.pop(source)
            follower.stop()
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
