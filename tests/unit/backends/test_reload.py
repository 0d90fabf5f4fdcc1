"""Settings of health and limits change while the fleet is in use."""

import asyncio
import time
from random import Random

from gateway.config import AdmissionConfig, HealthConfig
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.membership import Membership
from gateway.core.backends.probe import BackendWatches
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import EngineDead
from gateway.core.turns import at_once
from tests.unit.backends.conftest import MakeScene
from tests.unit.backends.scripted import Scripted

from .test_probe import until


def test_a_reload_of_the_same_settings_is_not_told_to_anyone(scene: MakeScene) -> None:
    made = scene(2)
    before = len(made.changes)
    made.fleet.apply_settings(HealthConfig(), AdmissionConfig())
    assert len(made.changes) == before


def test_a_reload_of_the_largest_share_of_ejections_counts_at_once(scene: MakeScene) -> None:
    made = scene(2, max_ejected=0.5)
    one, two = made.fleet.backends
    for backend in (one, two):
        made.fleet.failed(backend, EngineDead("dead"))
    assert len(made.fleet.serving("m") or ()) == 1
    made.fleet.apply_settings(HealthConfig(max_ejected=0.0), AdmissionConfig())
    assert len(made.fleet.serving("m") or ()) == 2
    assert [backend.health.state for backend in (one, two)] == ["ejected", "ejected"]


def test_a_reload_without_slow_starts_ends_them(scene: MakeScene) -> None:
    made = scene(2)
    backend = made.fleet.backends[0]
    backend.start_slowly(made.clock())
    made.fleet.apply_settings(HealthConfig(slow_start_seconds=60), AdmissionConfig())
    assert backend.limit(made.clock()) < backend.cap
    made.fleet.apply_settings(HealthConfig(slow_start_seconds=0), AdmissionConfig())
    assert backend.limit(made.clock()) == backend.cap


def test_a_reload_without_adaptive_limits_ends_a_lowered_one(scene: MakeScene) -> None:
    made = scene(1)
    limiter = made.fleet.backends[0].limiter
    limiter.limit = 3
    made.fleet.apply_settings(HealthConfig(), AdmissionConfig(itl_objective_seconds=0.1))
    assert limiter.limit == 3
    made.fleet.apply_settings(HealthConfig(), AdmissionConfig(adaptive=False))
    assert limiter.limit == limiter.upper == made.fleet.backends[0].engines[0].slots


async def test_a_reload_of_a_shorter_interval_does_not_wait_for_the_end_of_the_longer_one() -> None:
    async with Scripted() as server:
        config = HealthConfig(probe_interval_seconds=1000.0, refresh_seconds=1000.0)
        fleet = Fleet([BackendConfig(url=server.url)], config, clock=time.monotonic, random=Random(1))
        async with BackendWatches(fleet, config, clock=time.monotonic, random=Random(2)) as watches:
            await until(lambda: fleet.ready)
            await asyncio.sleep(0.3)  # what is asked at first
            version = fleet.backends[0].facts.version
            server.answers["/health"] = None  # type: ignore[assignment]
            watches.apply(HealthConfig(probe_interval_seconds=0.2, refresh_seconds=0.2))
            await until(lambda: fleet.backends[0].health.probe_error is not None)
            assert fleet.backends[0].facts.version == version


def test_sources_that_are_not_kept_lose_their_backends(scene: MakeScene) -> None:
    made = scene(1)
    membership = Membership(made.fleet)
    from gateway.core.backends.fleet import Wanted

    for source, name in (("dns x", "x"), ("dns y", "y")):
        at_once(membership.reconcile(source, [Wanted(BackendConfig(url=f"http://10.1.0.{ord(name)}:1", name=name))]))
    membership.keep_sources(["dns y"])
    assert [*made.fleet.by_name] == ["a", "y"]
    membership.keep_sources([])
    assert [*made.fleet.by_name] == ["a"]
