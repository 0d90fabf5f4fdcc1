"""The adapters that backends list and report, as their engines know them."""

from gateway.backends.facts import AdapterReport, Facts, ModelCard, Telemetry
from tests.unit.backends.conftest import MakeScene

BASE, A, B = ModelCard("m"), ModelCard("a", parent="m"), ModelCard("b", parent="m")


def telemetry(*running: str, most: int = 1) -> Telemetry:
    return Telemetry(1.0, 0, 0, 0.0, 0.0, adapters=AdapterReport(frozenset(running), most))


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
