"""Backends that sleep get no requests; the gateway puts to sleep and wakes those that the configuration names."""

from dataclasses import replace
from random import Random

import pytest

from gateway.config import HealthConfig
from gateway.core.backends.backend import FALLING_ASLEEP, OFFLOADED, Backend
from gateway.core.backends.facts import Facts, ModelCard, Telemetry
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig, SleepConfig
from gateway.features.models.sleep import action_for
from tests.unit.backends.conftest import ManualClock

AWAKE = Telemetry(1.0, running=0, waiting=0, preemptions=0.0, kv_usage=0.0, sleep_state="awake")
ASLEEP = replace(AWAKE, sleep_state=OFFLOADED)


def fleet_of(*sleeps: SleepConfig | None) -> Fleet:
    configs = [
        BackendConfig(url=f"http://{name}:1", name=name, sleep=each) for name, each in zip("abc", sleeps, strict=False)
    ]
    fleet = Fleet(configs, HealthConfig(), clock=ManualClock(), random=Random(1))
    for backend in fleet.backends:
        fleet.learned(backend, Facts(models=(ModelCard("m"),)))
        fleet.probed(backend, ProbeResult.OK)
    return fleet


def serving(fleet: Fleet) -> str:
    return "".join(backend.name for backend in fleet.serving("m") or ())


def test_a_backend_that_sleeps_gets_no_requests_and_forgets_its_cache() -> None:
    fleet, slept = fleet_of(None, None), list[Backend]()
    fleet.on_sleep.append(slept.append)
    one, other = fleet.backends
    fleet.measured(one, ASLEEP)
    fleet.measured(one, ASLEEP)
    assert (serving(fleet), slept, one.why_not) == ("b", [one], "asleep (weights_offloaded)")
    fleet.measured(other, replace(ASLEEP, sleep_state="discard_all"))
    assert (serving(fleet), fleet.ready, fleet.will_serve("m")) == ("", False, False)
    fleet.measured(one, AWAKE)
    assert (serving(fleet), fleet.ready) == ("a", True)
    fleet.measured(one, None)  # too old a report says nothing
    fleet.measured(other, replace(AWAKE, sleep_state=None))
    assert serving(fleet) == "a"


def test_one_that_can_be_woken_keeps_the_gateway_ready() -> None:
    fleet = fleet_of(SleepConfig())
    fleet.measured(fleet.backends[0], ASLEEP)
    assert (serving(fleet), fleet.ready, fleet.will_serve("m"), fleet.will_serve("n")) == ("", True, True, False)
    fleet.measured(fleet.backends[0], replace(ASLEEP, sleep_state="discard_all"))  # its weights are gone
    assert (fleet.ready, fleet.will_serve("m")) == (False, False)


def test_a_report_from_before_its_sleep_does_not_wake_it() -> None:
    fleet = fleet_of(SleepConfig())
    fleet.slept(fleet.backends[0], FALLING_ASLEEP)
    fleet.measured(fleet.backends[0], AWAKE)
    assert serving(fleet) == ""
    fleet.slept(fleet.backends[0], OFFLOADED)
    fleet.measured(fleet.backends[0], AWAKE)
    assert serving(fleet) == "a"


def test_a_new_process_is_awake() -> None:
    fleet = fleet_of(None)
    backend = fleet.backends[0]
    fleet.learned(backend, replace(backend.facts, process_start_seconds=1.0))
    fleet.measured(backend, ASLEEP)
    fleet.learned(backend, replace(backend.facts, process_start_seconds=2.0))
    assert serving(fleet) == "a"


@pytest.mark.parametrize(
    ("config", "state", "waiting", "idle_seconds", "action"),
    [
        (None, "", 0, 1e9, None),
        (None, OFFLOADED, 1, 0.0, None),
        (SleepConfig(), "", 0, 1e9, None),
        (SleepConfig(idle_seconds=60), "", 0, 59.9, None),
        (SleepConfig(idle_seconds=60), "", 0, 60.0, "sleep"),
        (SleepConfig(idle_seconds=60), "", 1, 60.0, None),
        (SleepConfig(idle_seconds=60), OFFLOADED, 0, 60.0, None),
        (SleepConfig(idle_seconds=60), FALLING_ASLEEP, 1, 60.0, None),
        (SleepConfig(idle_seconds=60), OFFLOADED, 1, 60.0, "wake"),
        (SleepConfig(wake=False), OFFLOADED, 1, 0.0, None),
        (SleepConfig(), "discard_all", 1, 0.0, None),
    ],
)
def test_when_a_backend_is_put_to_sleep_or_woken(
    config: SleepConfig | None, state: str, waiting: int, idle_seconds: float, action: str | None
) -> None:
    fleet = fleet_of(config)
    fleet.slept(fleet.backends[0], state)
    assert action_for(fleet.backends[0], waiting, idle_seconds) == action


def test_a_backend_that_is_down_or_drains_is_left_alone() -> None:
    fleet = fleet_of(SleepConfig(idle_seconds=1))
    for _ in range(3):
        fleet.probed(fleet.backends[0], ProbeResult.TIMEOUT)
    assert action_for(fleet.backends[0], 0, 1e9) is None
