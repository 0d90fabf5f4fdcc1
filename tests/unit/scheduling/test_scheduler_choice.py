import pytest

from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibration, CostModel, OutputLengths
from gateway.core.routing.policy import Options
from gateway.core.scheduling.admission import Capacity, choose
from tests.unit.routing.crowds import work
from tests.unit.scheduling.builders import ask

CAPACITY = Capacity(Calibration(CostModel()), OutputLengths(), window_seconds=0.1)


def option(name: str, cost: float, *, busy: int = 0, placed: int = 0) -> tuple[Engine, float]:
    """An engine of sixteen slots."""
    engine = Engine("abc".index(name), name, cap=16, slots=16, placed=placed)
    started = work(1, 10, 0.0, True)
    for _ in range(busy):
        engine.load.start(started, 0.0)
        engine.load.first_token(started, 0.0)
    return engine, cost


def chosen(*options: tuple[Engine, float], waits_for_best: bool = True, guarded: bool = False) -> str | None:
    priced = Options([engine for engine, _ in options], [cost for _, cost in options])
    found = choose(priced, ask(), CAPACITY, 0.0, waits_for_best, guarded)
    return options[found][0].name if found is not None else None


def test_the_cheapest_is_taken_and_where_it_is_full_none() -> None:
    assert chosen(option("a", 2.0), option("b", 1.0)) == "b"
    assert chosen(option("a", 2.0), option("b", 1.0, busy=16)) is None


def test_without_waiting_for_the_best_an_engine_with_capacity_is_taken() -> None:
    assert chosen(option("a", 2.0), option("b", 1.0, busy=16), waits_for_best=False) == "a"
    assert chosen(option("b", 1.0, busy=16), waits_for_best=False) is None


def test_of_equals_the_quieter_then_the_less_often_chosen_is_taken() -> None:
    assert chosen(option("a", 1.0, busy=2), option("b", 1.0, busy=1)) == "b"
    assert chosen(option("a", 1.0, placed=3), option("b", 1.0, placed=2)) == "b"


@pytest.mark.parametrize("waits_for_best", [True, False])
def test_the_last_slot_is_not_for_those_it_is_kept_from(waits_for_best: bool) -> None:
    assert chosen(option("a", 1.0, busy=15), waits_for_best=waits_for_best) == "a"
    assert chosen(option("a", 1.0, busy=15), waits_for_best=waits_for_best, guarded=True) is None


def test_no_options_give_no_choice() -> None:
    assert chosen() is None
