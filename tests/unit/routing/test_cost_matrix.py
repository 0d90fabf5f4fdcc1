"""The vectorised costs against those of one request on one engine, worked out anew each time."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.cost_matrix import CostMatrix
from gateway.routing.engine import CostModel, Engine, mean_stall_of, placement_costs, prefill_seconds
from tests.unit.routing.crowds import ASKS, MODELS, NOW, WORKS, AskedFor, engines, work

TIES_SECONDS = 25e-9  # at most, with so few in flight
INFINITE = float("inf")


class Naive:
    """Every cost as `placement_costs` has it; what was held out and closed is added each time."""

    def __init__(self, model: CostModel, asks: list[AskedFor], among: list[Engine]) -> None:
        self.model, self.demands, self.engines = model, asks, among
        self.stall = self._stall()
        self.held: list[tuple[int, int, float]] = []
        self.closed: set[tuple[int | None, int]] = set()

    def _stall(self) -> float:
        in_flight = sum(engine.load.in_flight for engine in self.engines)
        return mean_stall_of(self.model, in_flight, len(self.engines))

    def prefill(self, row: int, column: int) -> float:
        prompt, _, hits = self.demands[row]
        return prefill_seconds(self.model, self.engines[column].slowness, prompt, hits[column])

    def cost(self, row: int, column: int) -> float:
        if {(None, column), (row, column)} & self.closed:
            return INFINITE
        prompt, output, hits = self.demands[row]
        held = sum(seconds for holder, where, seconds in self.held if where == column and holder < row)
        costs, _ = placement_costs(self.model, self.engines, hits[: len(self.engines)], prompt, output, NOW)
        return costs[column] + held + self.prefill(row, column) * (self.stall - self._stall())

    def costs(self, row: int) -> list[float]:
        return [self.cost(row, column) for column in range(len(self.engines))]


def both(model: CostModel, asks: list[AskedFor], among: list[Engine]) -> tuple[CostMatrix, Naive]:
    count = len(among)
    hits = [np.array(hits[:count], dtype=np.float64) for _, _, hits in asks]
    matrix = CostMatrix(model, [ask[0] for ask in asks], [ask[1] for ask in asks], hits, among, NOW)
    return matrix, Naive(model, asks, among)


def near(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-9, abs=TIES_SECONDS)


@given(MODELS, st.lists(ASKS, min_size=1, max_size=6), engines())
def test_every_cell_is_the_cost_of_placing_that_request_there(
    model: CostModel, asks: list[AskedFor], among: list[Engine]
) -> None:
    matrix, naive = both(model, asks, among)
    for row in range(len(asks)):
        for column in range(len(among)):
            assert matrix.cost[row, column] == near(naive.cost(row, column))
            assert matrix.prefill(row, column) == pytest.approx(naive.prefill(row, column), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(MODELS, st.lists(ASKS, min_size=1, max_size=8), engines(), st.data())
def test_a_scan_sees_what_a_scan_that_recomputes_everything_sees(
    model: CostModel, asks: list[AskedFor], among: list[Engine], data: st.DataObject
) -> None:
    """Rows are visited in order, as `QueueScan` does; each may be bound, keep waiting, or close an engine."""
    matrix, naive = both(model, asks, among)
    columns = range(len(among))
    for row in range(len(asks)):
        if data.draw(st.booleans()):
            column = data.draw(st.sampled_from(columns))
            matrix.close(column, row)
            naive.closed.add((row, column))
        costs = naive.costs(row)
        best = matrix.best(row)
        if best is None:
            assert min(costs) == INFINITE
            assert matrix.by_cost(row) == []
            continue
        assert costs[best] == near(min(costs))
        by_cost = [costs[column] for column in matrix.by_cost(row)]
        assert len(by_cost) == sum(cost < INFINITE for cost in costs)
        assert all(later >= earlier or later == near(earlier) for earlier, later in pairwise(by_cost))
        column = data.draw(st.sampled_from(columns))
        match data.draw(st.sampled_from(["bind", "keep waiting", "close", "nothing"])):
            case "bind":
                among[column].load.start(data.draw(WORKS), NOW)
                matrix.bound(column)
            case "keep waiting":
                naive.held.append((row, column, naive.prefill(row, column)))
                matrix.keep_waiting(row, column)
            case "close":
                naive.closed.add((None, column))
                matrix.close(column)


def test_of_equal_costs_the_quietest_wins_then_the_one_that_was_chosen_less_often() -> None:
    ttft = CostModel(decode_weight=0.0)
    among = [Engine(number, "abc"[number]) for number in range(3)]
    among[0].placed, among[1].placed = 3, 2
    ask = [(1000, 200.0, [0] * 3)]
    assert both(ttft, ask, among)[0].by_cost(0) == [2, 1, 0]
    among[2].placed = 5
    assert both(ttft, ask, among)[0].by_cost(0) == [1, 0, 2]


def test_a_difference_of_a_microsecond_is_no_tie() -> None:
    among = [Engine(0, "a", placed=100), Engine(1, "b", slowness=1.0001)]
    assert both(CostModel(), [(1000, 200.0, [0, 0])], among)[0].best(0) == 0


def test_a_closed_engine_stays_closed_after_a_request_was_bound_there() -> None:
    among = [Engine(0, "a"), Engine(1, "b")]
    matrix, _ = both(CostModel(), [(1000, 200.0, [0, 0])] * 2, among)
    matrix.close(0)
    matrix.bound(0)
    assert matrix.best(1) == 1
    matrix.close(1, 1)
    matrix.bound(1)
    assert matrix.best(0) == 1
    assert matrix.best(1) is None


def test_waiting_for_an_engine_raises_its_cost_for_later_requests() -> None:
    among = [Engine(0, "a"), Engine(1, "b")]
    matrix, _ = both(CostModel(), [(1000, 200.0, [900, 0])] * 40, among)
    assert [matrix.best(row) for row in range(20)] == [0] * 20
    for row in range(20):
        matrix.keep_waiting(row, 0)
    assert matrix.best(20) == 1
    assert matrix.by_cost(20) == [1, 0]


def test_an_engine_that_became_cheaper_is_seen_by_all_later_requests() -> None:
    # Of a small KV cache more comes free with each answer when there is more context in it.
    engine, other = Engine(0, "a", kv_cache_tokens=10_000), Engine(1, "b", slowness=9.0)
    engine.load.start(work(1, 1, 0.0, observable=True), NOW)
    matrix, naive = both(CostModel(), [(9999, 200.0, [0, 0])] * 2, [engine, other])
    assert matrix.best(0) == 1
    engine.load.start(work(1, 2000, 0.0, observable=True), NOW)
    matrix.bound(0)
    assert naive.costs(1)[0] < naive.costs(1)[1]
    assert matrix.best(1) == 0


def test_no_requests_and_no_engines_have_no_costs() -> None:
    assert CostMatrix(CostModel(), [], [], [], [Engine(0, "a")], NOW).cost.shape == (0, 1)
