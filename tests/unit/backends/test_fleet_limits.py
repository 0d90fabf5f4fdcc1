"""The adaptive limits of the fleet's backends."""

from dataclasses import replace
from random import Random

from gateway.config import AdmissionConfig, HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.concurrency_limit import LimitChange, LimitReason
from gateway.core.backends.facts import Telemetry
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_metrics import MetricsReader
from gateway.core.request import Demand
from gateway.core.routing.kv_reservations import Reservation
from gateway.core.turns import at_once

from .conftest import MakeScene, ManualClock


def sent_before(backend: Backend) -> None:
    """The gateway has sent 1,000 requests there, 200 of which are in flight."""
    [engine] = backend.engines
    engine.placed, engine.load.in_flight = 1000, 200


def overloaded(at: float, waiting: int) -> Telemetry:
    return Telemetry(at, running=64, waiting=waiting, preemptions=0.0, kv_usage=0.5)


def test_samples_of_an_engine_change_its_limit_and_notify_listeners(scene: MakeScene) -> None:
    s = scene(1)
    [a] = s.fleet.backends
    moves: list[tuple[str, LimitChange | None]] = []
    s.fleet.on_limit.append(lambda backend, move: moves.append((backend.name, move)))
    sent_before(a)
    s.fleet.measured(a, overloaded(1.0, 136))
    s.fleet.measured(a, overloaded(3.0, 136))
    assert moves == [("a", LimitChange(3.0, LimitReason.WAITING, 256, after=100))]
    assert (a.limit(3.0), a.cap) == (100, 256)


def test_a_long_prefill_in_flight_explains_what_waits_behind_it(scene: MakeScene) -> None:
    s = scene(1)
    [a] = s.fleet.backends
    [engine] = a.engines
    for prefill_seconds in (8.0, *[0.1] * 60):
        engine.load.start(Reservation(Demand("m"), 1, prefill_seconds), 1.0)
    for second in (1.0, 3.0, 5.0):
        s.fleet.measured(a, Telemetry(second, running=1, waiting=60, preemptions=0.0, kv_usage=0.5))
    assert a.limit(5.0) == 256
    s.fleet.measured(
        a, Telemetry(9.0, running=1, waiting=60, preemptions=0.0, kv_usage=0.5)
    )  # it should be over: what waits, waits for something else
    assert a.limit(9.0) == 31


def test_requests_that_wait_for_an_adapter_do_not_count(scene: MakeScene) -> None:
    s = scene(1)
    [a] = s.fleet.backends
    sent_before(a)
    labels = 'engine="0",model_name="m"'
    lines = [f"vllm:num_requests_running{{{labels}}} 64", f"vllm:num_requests_waiting{{{labels}}} 136"]
    for reason, waiting in (("capacity", 0), ("deferred", 136)):
        lines.append(f'vllm:num_requests_waiting_by_reason{{{labels},reason="{reason}"}} {waiting}')
    reader = MetricsReader()
    for second in range(5):
        s.fleet.measured(a, at_once(reader.read(map(str.encode, lines), second)).telemetry)
    assert a.limit(5.0) == 256


def test_samples_with_a_gap_between_them_are_not_compared(scene: MakeScene) -> None:
    s = scene(1)
    [a] = s.fleet.backends
    sent_before(a)
    s.fleet.measured(a, overloaded(1.0, 136))
    s.fleet.measured(a, None)
    s.fleet.measured(a, overloaded(60.0, 136))
    assert a.limit(60.0) == 256


def test_a_restart_voids_what_the_limit_had_learned(scene: MakeScene) -> None:
    s = scene(2)
    a = s.fleet.backends[0]
    sent_before(a)
    s.fleet.learned(a, replace(a.facts, process_start_seconds=1.0))
    s.fleet.measured(a, overloaded(1.0, 136))
    s.fleet.measured(a, overloaded(3.0, 136))
    assert a.limiter.limit == 100
    s.fleet.learned(a, replace(a.facts, process_start_seconds=2.0))
    assert a.limiter.limit == 256
    assert a.limiter.last_change is not None
    assert a.limiter.last_change.reason is LimitReason.RESTART


def test_the_limit_stays_where_the_configuration_says_so() -> None:
    admission = AdmissionConfig(adaptive=False)
    fleet = Fleet(
        [BackendConfig(url="http://h:1")], HealthConfig(), clock=ManualClock(), random=Random(1), admission=admission
    )
    sent_before(fleet.backends[0])
    for second in range(5):
        fleet.measured(fleet.backends[0], overloaded(second, 136))
    assert fleet.backends[0].limit(5.0) == 256
