"""One look through the line, with a ranking that the test writes down."""

from collections.abc import Sequence

import pytest

from gateway.request import Demand
from gateway.routing.engine import CostModel, Engine
from gateway.routing.estimates import Calibration, OutputLengths
from gateway.scheduling.admission import Capacity, QueueScan
from gateway.scheduling.wait_queue import Ticket
from tests.unit.routing.crowds import work

NOW, STARVATION_SECONDS = 100.0, 30.0
CAPACITY = Capacity(Calibration(CostModel(), window_seconds=0.1), OutputLengths())


class Written:
    """A fixed ranking, except for what is closed; records calls."""

    def __init__(self, *orders: str) -> None:
        self.orders = [[ord(name) - ord("a") for name in order] for order in orders]
        self.calls: list[str] = []
        self.closed: set[tuple[int | None, int]] = set()

    def best(self, row: int) -> int | None:
        return next(iter(self.by_cost(row)), None)

    def skip(self, row: int, is_open: Sequence[bool]) -> int:
        return row

    def by_cost(self, row: int) -> Sequence[int]:
        return [at for at in self.orders[row] if not self.closed & {(None, at), (row, at)}]

    def prefill(self, row: int, column: int) -> float:
        return row + column / 10

    def keep_waiting(self, row: int, column: int) -> None:
        self.calls.append(f"{row} waits for {'abc'[column]}")

    def bound(self, column: int) -> None:
        self.calls.append(f"bound to {'abc'[column]}")

    def close(self, column: int, row: int | None = None) -> None:
        self.calls.append(f"{'abc'[column]} closed")
        self.closed.add((row, column))


class Scene:
    """Engines of so many free slots each, of two; requests that arrived so many seconds ago."""

    def __init__(
        self, ranking: Written, *free: int, waited: Sequence[float] | None = None, slots: int = 2, **wish: int
    ) -> None:
        self.ranking = ranking
        self.engines = [Engine(number, "abc"[number], cap=slots, slots=slots) for number in range(len(free))]
        for engine, count in zip(self.engines, free, strict=True):
            for _ in range(slots - count):
                self.take(engine)
        waited = waited or [1.0] * len(ranking.orders)
        asks = [Demand("m", **(wish if row == 0 else {})) for row in range(len(waited))]  # type: ignore[arg-type]
        self.tickets = [Ticket(ask, NOW - ago, frozenset(), 0.0) for ask, ago in zip(asks, waited, strict=True)]
        self.bound: list[str] = []

    def take(self, engine: Engine, sequences: int = 1) -> None:
        started = work(sequences, 100, 0.0, observable=True)
        engine.load.start(started, NOW)
        engine.load.first_token(started, NOW)

    def bind(self, ticket: Ticket, column: int, prefill_seconds: float) -> None:
        row = self.tickets.index(ticket)
        assert prefill_seconds == row + column / 10
        self.bound.append(f"{row} to {'abc'[column]}")
        self.take(self.engines[column], ticket.demand.sequences)

    def run(self, *, waits_for_best: bool = True, much: str = "", all_guarded: bool = False) -> list[str]:
        """`much`: the rows of tenants over their share."""
        is_open = [CAPACITY.is_open(engine, NOW, guarded=all_guarded) for engine in self.engines]
        is_over_share = (lambda ticket: str(self.tickets.index(ticket)) in much) if much else None
        QueueScan(
            self.engines, self.ranking, is_open, CAPACITY, STARVATION_SECONDS, waits_for_best, self.bind, is_over_share,
            all_guarded,
        ).run(self.tickets, NOW)  # fmt: skip
        assert is_open == [
            CAPACITY.is_open(engine, NOW, guarded=all_guarded) and (None, column) not in self.ranking.closed
            for column, engine in enumerate(self.engines)
        ]
        return self.bound


def test_a_request_whose_best_engine_is_open_is_bound_there_and_the_others_count_it() -> None:
    scene = Scene(Written("ab", "ab"), 2, 2)
    assert scene.run() == ["0 to a", "1 to a"]
    assert scene.ranking.calls == ["bound to a", "bound to a"]


def test_a_request_whose_best_engine_is_taken_waits_and_others_overtake() -> None:
    scene = Scene(Written("ab", "ba"), 0, 1)
    assert scene.run() == ["1 to b"]
    assert scene.ranking.calls == ["0 waits for a", "bound to b"]


def test_the_scan_ends_when_the_last_engine_closes() -> None:
    scene = Scene(Written("ab", "ab", "ba"), 1, 0)
    assert scene.run() == ["0 to a"]
    assert scene.ranking.calls == ["bound to a"]


def test_a_request_that_does_not_fit_blocks_no_others() -> None:
    scene = Scene(Written("ab", "ab", "ba"), 1, 1, sequences=2)
    assert scene.run() == ["1 to a", "2 to b"]
    assert scene.ranking.calls == ["bound to a", "bound to b"]


def test_a_request_to_which_all_engines_are_closed_is_passed_over() -> None:
    assert Scene(Written("", "a"), 1).run() == ["1 to a"]


def test_a_starving_request_takes_any_engine_with_capacity() -> None:
    scene = Scene(Written("acb", "ab"), 0, 1, 1, waited=[STARVATION_SECONDS + 1, 1.0])
    assert scene.run() == ["0 to c"]
    assert scene.ranking.calls == ["bound to c", "1 waits for a"]


def test_at_the_starvation_time_exactly_one_still_waits() -> None:
    assert Scene(Written("ab"), 0, 1, waited=[STARVATION_SECONDS]).run() == []


def test_a_starving_request_without_capacity_reserves_the_emptiest_engine() -> None:
    scene = Scene(Written("ab", "ba", "ab"), 1, 1, waited=[STARVATION_SECONDS + 1, 1.0, 1.0], sequences=2)
    assert scene.run() == ["1 to b"]
    assert scene.ranking.calls == ["a closed", "bound to b"]


def test_a_second_starving_request_reserves_another() -> None:
    waited = [STARVATION_SECONDS + 2, STARVATION_SECONDS + 1, 1.0]
    scene = Scene(Written("ab", "ab", "ab"), 0, 0, waited=waited)
    assert scene.run() == []
    assert scene.ranking.calls == ["a closed", "b closed"]


@pytest.mark.parametrize("waited", [1.0, STARVATION_SECONDS + 1])
def test_without_waiting_for_the_best_each_takes_the_first_engine_with_capacity(waited: float) -> None:
    scene = Scene(Written("abc", "abc", "abc"), 0, 1, 1, waited=[waited] * 3)
    assert scene.run(waits_for_best=False) == ["0 to b", "1 to c"]


def test_a_tenant_over_its_share_waits_for_an_engine_with_only_guarded_slots() -> None:
    scene = Scene(Written("ab", "ab", "ab"), 1, 0, slots=4)
    assert scene.run(much="0") == ["1 to a"]
    assert scene.ranking.calls[0] == "0 waits for a"


@pytest.mark.parametrize("waits_for_best", [True, False])
def test_with_more_free_slots_it_is_bound_like_any_other(waits_for_best: bool) -> None:
    assert Scene(Written("a", "a"), 2, slots=4).run(much="01", waits_for_best=waits_for_best) == ["0 to a"]


def test_a_starving_request_of_a_tenant_over_its_share_reserves_an_engine_from_its_like_only() -> None:
    scene = Scene(Written("a", "ab", "ab", "ab"), 1, 1, slots=4, waited=[31.0, 1.0, 31.0, 31.0])
    assert scene.run(much="03") == ["1 to a", "2 to b"]
    assert scene.ranking.calls == ["bound to a", "bound to b"]


def test_where_all_have_much_engines_with_the_last_slots_alone_count_as_closed() -> None:
    scene = Scene(Written("ab", "ba"), 1, 2, slots=4)
    assert scene.run(all_guarded=True) == ["1 to b"]


def test_the_emptiest_engine_is_the_one_with_the_smallest_share_taken_that_can_run_the_request_at_all() -> None:
    engines = [Engine(0, "a", cap=2, slots=2), Engine(1, "b", cap=4, slots=4), Engine(2, "c", cap=8, slots=8)]
    for engine, running in zip(engines, (0, 3, 4), strict=True):
        for _ in range(running):
            engine.load.start(work(1, 100, 0.0, observable=True), 0.0)
    scan = QueueScan(engines, Written(), [True] * 3, CAPACITY, STARVATION_SECONDS, True, lambda *_: None)  # type: ignore[arg-type]
    assert min(range(3), key=lambda at: scan._fullness(at, Demand("m"))) == 0
    assert min(range(3), key=lambda at: scan._fullness(at, Demand("m", sequences=3))) == 2
