"""Events of the fleet, as the gateway's own notifications make them."""

from typing import Any

from gateway.config import BackendConfig
from gateway.core.backends.concurrency_limit import LimitChange, LimitReason
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.health import ProbeResult
from gateway.core.errors import EngineDead
from tests.unit.page.builders import House


def events(house: House, count: int = 0) -> list[dict[str, Any]]:
    return house.gateway.operators.timeline.since(count, 0.0)


def kinds(house: House, count: int = 0) -> list[tuple[str, str]]:
    return [(each["kind"], each["subject"]) for each in events(house, count)]


def test_backends_that_come_up_and_go_down_are_events_with_a_reason() -> None:
    house = House(3)
    assert kinds(house) == [("up", "gpu-0"), ("up", "gpu-1"), ("up", "gpu-2")]
    gateway, before = house.gateway, house.gateway.operators.timeline.happened
    house.now = 1010.0
    for _ in range(5):
        gateway.core.fleet.probed(gateway.core.fleet.backends[1], ProbeResult.REFUSED, "connection refused")
    house.now = 1013.0
    house.gateway.operators.timeline.look()  # the fleet's notification came before: with the first refused connection
    [down] = events(house, before)
    assert down == {"time": 1010.0, "kind": "down", "subject": "gpu-1", "detail": "connection refused", "bad": True}


def test_an_ejection_and_its_end_are_events() -> None:
    house = House(3)
    gateway, before = house.gateway, house.gateway.operators.timeline.happened
    gateway.core.fleet.failed(gateway.core.fleet.backends[0], EngineDead("The engine is dead."))
    assert kinds(house, before) == [("ejected", "gpu-0")]
    assert events(house, before)[0]["detail"].startswith("requests failed; back in ")
    house.now += 1000.0
    gateway.core.fleet.probed(gateway.core.fleet.backends[0], ProbeResult.OK)
    assert kinds(house, before)[-1] == ("up", "gpu-0")


def test_backends_that_join_drain_and_leave_are_events() -> None:
    house = House(2)
    gateway, before = house.gateway, house.gateway.operators.timeline.happened
    gateway.core.membership.add(BackendConfig(url="http://10.9.9.9:1", name="new"))
    gateway.core.membership.drain("gpu-0")
    gateway.core.membership.remove("gpu-1")
    assert kinds(house, before) == [("joined", "new"), ("draining", "gpu-0"), ("left", "gpu-1")]


def test_only_falls_of_a_limit_are_events_and_restarts_and_reloads() -> None:
    house = House(1)
    house.gateway.operators.timeline.look()
    [backend], before = house.gateway.core.fleet.backends, house.gateway.operators.timeline.happened
    house.gateway.operators.timeline.limit_moved(backend, LimitChange(1.0, LimitReason.PREEMPTIONS, 16, after=12))
    house.gateway.operators.timeline.limit_moved(backend, LimitChange(1.0, LimitReason.ROOM, 12, after=14))
    house.gateway.operators.timeline.limit_moved(backend, None)
    assert [each["detail"] for each in events(house, before)] == ["16 to 12: preemptions"]
    house.gateway.core.fleet.learned(backend, Facts(version="0.34.0", models=(ModelCard("m"),), kv_event_sources=()))
    house.gateway.apply(house.gateway.core.config)
    assert [kind for kind, _ in kinds(house, before)] == ["limit", "restarted", "reloaded"]


def test_the_number_of_events_is_bounded() -> None:
    house = House(1)
    for _ in range(2000):
        house.gateway.operators.timeline.reloaded()
    assert len(events(house)) == 500
    assert len(events(house, house.gateway.operators.timeline.happened - 3)) == 3
