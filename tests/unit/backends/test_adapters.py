"""The adapters that backends list and report, as their engines know them."""

from gateway.core.backends.facts import AdapterReport, Facts, ModelCard, Telemetry
from gateway.features.models.adapter_loader import backend_for
from tests.unit.backends.conftest import MakeScene

BASE, A, B = ModelCard("m"), ModelCard("a", parent="m"), ModelCard("b", parent="m")


def telemetry(*running: str, most: int = 1) -> Telemetry:
    return Telemetry(
        1.0, running=0, waiting=0, preemptions=0.0, kv_usage=0.0, adapters=AdapterReport(frozenset(running), most)
    )


def test_what_an_engine_runs_is_on_its_gpu(scene: MakeScene) -> None:
    s = scene(2)
    one, other = s.fleet.backends
    s.fleet.learned(one, Facts(models=(BASE, A, B), process_start_seconds=1.0))
    s.fleet.learned(other, Facts(models=(BASE,)))
    s.fleet.measured(one, telemetry("a"))
    s.fleet.measured(other, telemetry())
    slots = one.engines[0].adapters
    assert slots is not None
    assert (slots.loaded, slots.seconds("a"), slots.seconds("b") > 1) == (["a"], 0.0, True)
    assert other.engines[0].adapters is None
    s.fleet.learned(one, Facts(models=(BASE, A, B), process_start_seconds=2.0))
    assert slots.loaded == []
    s.fleet.learned(one, Facts(models=(BASE,), process_start_seconds=2.0))
    assert slots.names == frozenset()


def test_a_report_does_not_say_which_rank_runs_an_adapter(scene: MakeScene) -> None:
    s = scene(1)
    backend = s.fleet.backends[0]
    s.fleet.learned(backend, Facts(models=(BASE, A), engines=2))
    s.fleet.measured(backend, telemetry("a", most=3))
    assert [(each.adapters.loaded, each.adapters.most) for each in backend.engines if each.adapters] == [([], 3)] * 2


def test_an_adapter_is_loaded_where_the_least_is_in_flight(scene: MakeScene) -> None:
    s = scene(3)
    for backend in s.fleet.backends:
        s.fleet.learned(backend, Facts(models=(BASE,)))
    one, two, three = s.fleet.backends
    one.engines[0].load.in_flight = 1
    assert backend_for(s.fleet, "a", "m", lambda _: False) is two
    assert backend_for(s.fleet, "a", "m", lambda backend: backend is two) is three
    s.fleet.learned(two, Facts(models=(BASE, A)))
    s.fleet.learned(three, Facts(models=(BASE, A)))
    assert backend_for(s.fleet, "a", "m", lambda _: False) is one
    assert backend_for(s.fleet, "a", "m", lambda backend: backend is one) is None
    assert backend_for(s.fleet, "a", "other", lambda _: False) is None


def test_requests_wait_for_an_adapter_that_can_be_loaded(scene: MakeScene) -> None:
    s = scene(1)
    s.fleet.learned(s.fleet.backends[0], Facts(models=(BASE,)))
    assert (s.fleet.candidates("a"), s.fleet.will_serve("a")) == (None, False)
    s.fleet.expect_adapters({"a": "m", "z": "never seen"})
    assert (s.fleet.candidates("a"), s.fleet.will_serve("a")) == ([], True)
    assert (s.fleet.candidates("z"), s.fleet.will_serve("z")) == ([], False)
    s.fleet.learned(s.fleet.backends[0], Facts(models=(BASE, A)))
    assert s.fleet.candidates("a") == [*s.fleet.backends[0].engines]
