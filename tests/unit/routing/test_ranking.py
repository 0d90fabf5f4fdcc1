from gateway.request import Demand
from gateway.routing.cost_matrix import Ranking
from gateway.routing.engine import CostModel, Engine
from gateway.routing.policy import LeastLoadedPolicy
from tests.unit.routing.crowds import work


def busy(engine: Engine, requests: int) -> None:
    for _ in range(requests):
        engine.load.start(work(1, 100, 0.0, observable=True), 0.0)


def engines(*in_flight: int) -> list[Engine]:
    made = [Engine(number, "abcdefgh"[number], slots=8) for number in range(len(in_flight))]
    for engine, count in zip(made, in_flight, strict=True):
        busy(engine, count)
    return made


def ranking(among: list[Engine]) -> Ranking:
    return Ranking(among, lambda _: LeastLoadedPolicy().options(Demand("m"), among, CostModel(), 0.0).costs)


def test_engines_come_cheapest_first() -> None:
    ranks = ranking(engines(3, 1, 2))
    assert ranks.by_cost(0) == [1, 2, 0]
    assert ranks.best(0) == 1


def test_of_equal_costs_the_quietest_comes_first_then_the_one_that_was_chosen_less_often() -> None:
    among = engines(2, 1, 1)
    among[1].placed = 5
    assert Ranking(among, lambda _: [1.0, 1.0, 1.0]).by_cost(0) == [2, 1, 0]


def test_loads_are_read_again_after_a_request_was_bound() -> None:
    among = engines(1, 0)
    ranks = ranking(among)
    assert ranks.best(0) == 1
    busy(among[1], 2)
    ranks.bound(1)
    assert ranks.best(1) == 0


def test_an_engine_can_be_closed_to_one_request_or_to_all() -> None:
    ranks = ranking(engines(1, 0, 2))
    ranks.close(1, 0)
    assert [ranks.best(row) for row in range(3)] == [0, 1, 1]
    ranks.close(1)
    assert [ranks.best(row) for row in range(3)] == [0, 0, 0]
    ranks.close(0)
    ranks.close(2, 2)
    assert [ranks.by_cost(row) for row in range(3)] == [[2], [2], []]
    assert ranks.best(2) is None


def test_no_request_waits_for_an_engine_and_prefills_are_unknown() -> None:
    ranks = ranking(engines(1, 0))
    ranks.keep_waiting(0, 1)
    assert ranks.best(1) == 1
    assert ranks.prefill(0, 1) == 0.0
    assert ranks.skip(1, [True, True]) == 1
