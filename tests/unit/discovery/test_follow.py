"""A source is followed: what it lists is applied when it changes, and what is wrong is logged once."""

from collections.abc import AsyncGenerator, Sequence
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.core.backends.fleet import FleetChanges, Wanted
from gateway.core.backends.settings import BackendConfig
from gateway.core.turns import Steps
from gateway.features.discovery.follow import SourceFollower
from gateway.features.discovery.listings import DiscoveryError, Listing


def listing(*names: str, problem: str = "") -> Listing:
    return Listing(tuple(Wanted(BackendConfig(url=f"http://{name}:8000", name=name)) for name in names), problem)


MAX_BACKENDS = 3


class Scripted:
    """Yields what a test says, one list for each start; a string is the reason for which it fails."""

    name = "scripted"

    def __init__(self, *starts: Sequence[Listing | str]) -> None:
        self._starts = iter(starts)
        self.closed = 0

    async def listings(self) -> AsyncGenerator[Listing, None]:
        try:
            for step in next(self._starts):
                if isinstance(step, str):
                    raise DiscoveryError(step)
                yield step
        finally:
            self.closed += 1


class Followed:
    """The follower of a scripted source. `slept`: the seconds of its pauses, by the longest jitter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *starts: Sequence[Listing | str]) -> None:
        self.source = Scripted(*starts)
        self.applied: list[list[str]] = []
        self.slept: list[float] = []
        self._starts = len(starts)
        self._follower = SourceFollower(self.source, self._follow, self.LongestJitter(), max_backends=MAX_BACKENDS)
        monkeypatch.setattr("asyncio.sleep", self._sleep)

    class LongestJitter(Random):
        def uniform(self, a: float, b: float) -> float:
            assert (a, b) == (0.5, 1.0)
            return b

    def _follow(self, source: str, wanted: Sequence[Wanted]) -> Steps[FleetChanges]:
        assert source == "scripted"
        yield
        self.applied.append([each.config.name for each in wanted])
        return FleetChanges(added=self.applied[-1])

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            self.slept.append(seconds)

    async def run(self) -> list[Any]:
        """Let the source start as often as it is scripted; gives what was logged."""
        with capture_logs() as events:
            for _ in range(self._starts):
                await self._follower.step()
        assert self.source.closed == self._starts
        return [(each["event"], each.get("reason") or each.get("added")) for each in events]


async def test_what_has_not_changed_is_not_applied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, [listing(), listing("a"), listing("a"), "gone"], [listing("a"), listing("a", "b")])
    assert await followed.run() == [
        ("discovered", []), ("discovered", ["a"]), ("discovery_failed", "gone"), ("discovered", ["a", "b"]),
    ]  # fmt: skip
    assert followed.applied == [[], ["a"], ["a", "b"]]


async def test_a_failure_is_logged_once_for_each_reason_and_the_list_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, [listing("a"), "down"], ["down"], ["refused"], [listing("a"), "refused"])
    assert await followed.run() == [
        ("discovered", ["a"]), ("discovery_failed", "down"), ("discovery_failed", "refused"),
        ("discovery_failed", "refused"),
    ]  # fmt: skip
    assert followed.applied == [["a"]]


async def test_a_problem_of_a_list_is_logged_and_the_list_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = listing("a", problem="no port")
    followed = Followed(monkeypatch, [odd, odd, listing("a"), odd])
    assert await followed.run() == [
        ("discovery_failed", "no port"), ("discovered", ["a"]), ("discovery_failed", "no port"),
    ]  # fmt: skip


async def test_pauses_grow_until_the_source_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, *[["down"]] * 6, [listing("a"), "down"], ["down"])
    await followed.run()
    assert followed.slept == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 1.0, 2.0]


async def test_what_is_listed_beyond_the_limit_is_left_out_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, [listing(*"abcd"), listing(*"abcd"), listing(*"abc"), listing(*"abcde")])
    beyond = "{} backends are listed; only the first 3 are used. Raise discovery.max_backends."
    assert await followed.run() == [
        ("discovery_failed", beyond.format(4)),
        ("discovered", ["a", "b", "c"]),
        ("discovery_failed", beyond.format(5)),
    ]
    assert followed.applied == [["a", "b", "c"]]
