"""One look through the line, with an order of engines that the test writes down."""

from collections.abc import Sequence
from math import inf

import pytest

from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibration, CostModel, OutputLengths
from gateway.core.routing.kv_reservations import Reservation
from gateway.core.routing.policy import Options, Policy
from gateway.core.scheduling.admission import Capacity, QueueScan
from gateway.core.scheduling.fair_share import Tenant, Tenants
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.routing.crowds import work
from tests.unit.scheduling.builders import ticket

NOW = 100.0
CAPACITY = Capacity(Calibration(CostModel()), OutputLengths(), window_seconds=0.1)


class Written(Policy):
    """A written order of engines for each row, however busy they are; counts how often a row is priced."""

    def __init__(self, *orders: str, apart_seconds: float = 1.0) -> None:
        self.orders = [[ord(name) - ord("a") for name in order] for order in orders]
        self.apart_seconds = apart_seconds
        self.priced: list[int] = []
        self.waits_for_best = True

    def options(self, demand: Demand, engines: Sequence[Engine], model: CostModel, now: float) -> Options:
        row = demand.hint
        self.priced.append(row)
        order = self.orders[row]
        costs = [order.index(at) * self.apart_seconds if at in order else inf for at in range(len(engines))]
        return Options(engines, costs, [row + at / 10 for at in range(len(engines))])


class OverShare(Tenants):
    """Tenants of which those of the given rows are over their share."""

    def __init__(self, rows: str) -> None:
        super().__init__()
        self.rows = rows

    def is_over_share(self, tenant: Tenant, now: float, *, batch: bool) -> bool:
        return tenant.name in self.rows


class Scene:
    """Engines of so many free slots each, of two; requests, of which the given row starves."""

    def __init__(self, policy: Written, *free: int, starving: int | None = None, slots: int = 2, **wish: int) -> None:
        self.policy = policy
        self.started: list[tuple[Engine, Reservation]] = []
        self.engines = [Engine(number, "abc"[number], cap=slots, slots=slots) for number in range(len(free))]
        for engine, count in zip(self.engines, free, strict=True):
            for _ in range(slots - count):
                self.take(engine)
        self.tickets = []
        for row in range(len(policy.orders)):
            demand = Demand("m", tenant=str(row), hint=row, **(wish if row == 0 else {}))  # type: ignore[arg-type]
            self.tickets.append(ticket(demand, NOW - 1.0))
        self.starving = None if starving is None else self.tickets[starving]
        self.bound: list[str] = []
        self.scan = self.new_scan(NOW)

    def new_scan(self, now: float, much: str = "") -> QueueScan:
        is_open = CAPACITY.are_open(self.engines, now)
        tenants = OverShare(much) if much else None
        scan = QueueScan(self.engines, self.policy, CAPACITY, is_open, now, self.bind, tenants)
        self.scan = scan
        return scan

    def take(self, engine: Engine, sequences: int = 1) -> None:
        started = work(sequences, 100, 0.0, observable=True)
        self.started.append((engine, started))
        engine.load.start(started, NOW)
        engine.load.first_token(started, NOW)

    def bind(self, ticket: Ticket, at: int, options: Options) -> None:
        row = self.tickets.index(ticket)
        assert options.prefill_seconds[at] == row + at / 10
        self.bound.append(f"{row} to {'abc'[at]}")
        self.take(self.engines[at], ticket.demand.sequences)

    @property
    def closed(self) -> str:
        """The engines that are reserved for requests that starve."""
        return "".join(name for name, held in zip("abc", self.scan.held, strict=False) if held == inf)

    def run(self, *, waits_for_best: bool = True, much: str = "", now: float = NOW) -> list[str]:
        """`much`: the rows of tenants over their share."""
        self.policy.waits_for_best = waits_for_best
        scan = self.new_scan(now, much)
        open_ones = {
            row: [at for at in order if at < len(self.engines)] for row, order in enumerate(self.policy.orders)
        }
        eligible = {one: open_ones[row] for row, one in enumerate(self.tickets) if open_ones[row]}
        scan.run(self.tickets, eligible, self.starving)
        assert scan.is_open == [
            CAPACITY.is_open(engine, now) and scan.held[at] < inf for at, engine in enumerate(self.engines)
        ]
        return self.bound


def test_a_request_whose_best_engine_is_open_is_bound_there_and_the_others_count_it() -> None:
    scene = Scene(Written("ab", "ab"), 2, 2)
    assert scene.run() == ["0 to a", "1 to a"]


def test_a_request_whose_best_engine_is_taken_waits_and_others_overtake() -> None:
    scene = Scene(Written("ab", "ba"), 0, 1)
    assert scene.run() == ["1 to b"]
    assert scene.scan.held == [0.0, 0.0]
    assert scene.run() == ["1 to b"]


def test_the_prefill_of_a_request_that_waits_counts_on_its_engine_for_those_behind() -> None:
    scene = Scene(Written("ab", "ab", "ab", "ab"), 0, 1)
    assert scene.run() == ["2 to b"]
    assert scene.scan.held == [1.0, 0.0]


def test_a_request_whose_best_engine_is_clearly_better_is_not_priced_again_for_a_while() -> None:
    scene = Scene(Written("ab"), 0, 1)
    for now, times in ((NOW, 1), (NOW + 0.02, 1), (NOW + 0.06, 2), (NOW + 0.08, 2)):
        assert scene.run(now=now) == []
        assert len(scene.policy.priced) == times


def test_one_to_which_engines_are_much_alike_is_priced_in_each_scan() -> None:
    scene = Scene(Written("ab", apart_seconds=0.001), 0, 1)
    for times in (1, 2, 3):
        scene.run()
        assert len(scene.policy.priced) == times


def test_a_request_is_priced_again_as_soon_as_its_engine_is_open() -> None:
    scene = Scene(Written("ab"), 0, 1)
    scene.run()
    engine, running = scene.started[0]
    assert engine is scene.engines[0]
    engine.load.finish(running, NOW)
    assert scene.run(now=NOW + 0.001) == ["0 to a"]


def test_what_is_remembered_of_other_engines_does_not_count() -> None:
    scene = Scene(Written("ab"), 0, 1)
    scene.tickets[0].choose(5, 1.0, [], NOW + 1.0)
    assert scene.run() == []
    assert scene.tickets[0].waits_for == 0


def test_the_scan_ends_when_the_last_engine_closes() -> None:
    scene = Scene(Written("ab", "ab", "ba"), 1, 0)
    assert scene.run() == ["0 to a"]
    assert scene.policy.priced == [0]


def test_a_request_that_does_not_fit_blocks_no_others() -> None:
    scene = Scene(Written("ab", "ab", "ba"), 1, 1, sequences=2)
    assert scene.run() == ["1 to a", "2 to b"]


def test_a_request_to_which_all_engines_are_closed_is_passed_over() -> None:
    assert Scene(Written("", "a"), 1).run() == ["1 to a"]


def test_the_emptiest_engine_is_kept_for_a_starving_request_until_it_has_capacity() -> None:
    scene = Scene(Written("bac", "ab", "ba"), 2, 1, 0, starving=0, slots=3, sequences=3)
    assert scene.run() == ["1 to b"]
    assert scene.closed == "a"
    engine, running = scene.started[0]
    engine.load.finish(running, NOW)
    scene.bound.clear()
    assert scene.run() == ["0 to a"]


def test_a_starving_request_comes_first_and_once() -> None:
    scene = Scene(Written("ab", "ab", "ab"), 2, 1, starving=2)
    assert scene.run() == ["2 to a", "0 to a"]


@pytest.mark.parametrize("starving", [None, 0])
def test_without_waiting_for_the_best_each_takes_the_first_engine_with_capacity(starving: int | None) -> None:
    scene = Scene(Written("abc", "abc", "abc"), 0, 1, 1, starving=starving)
    assert scene.run(waits_for_best=False) == ["0 to b", "1 to c"]


def test_a_tenant_over_its_share_waits_for_an_engine_with_only_guarded_slots() -> None:
    scene = Scene(Written("ab", "ab", "ab"), 1, 0, slots=4)
    assert scene.run(much="0") == ["1 to a"]
    assert scene.scan.held[0] == 0.0


@pytest.mark.parametrize("waits_for_best", [True, False])
def test_with_more_free_slots_it_is_bound_like_any_other(waits_for_best: bool) -> None:
    assert Scene(Written("a", "a"), 2, slots=4).run(much="01", waits_for_best=waits_for_best) == ["0 to a"]


def test_a_starving_request_of_a_tenant_over_its_share_reserves_an_engine_from_its_like_only() -> None:
    scene = Scene(Written("a", "ab", "ba", "ab"), 1, 1, slots=4, starving=0)
    assert scene.run(much="03") == ["1 to a", "2 to b"]
    assert scene.closed == ""


def test_where_all_have_much_engines_with_the_last_slots_alone_count_as_closed() -> None:
    scene = Scene(Written("ab", "ba"), 1, 2, slots=4)
    assert scene.run(much="01") == ["1 to b"]


def test_the_emptiest_engine_is_the_one_with_the_smallest_share_taken_that_can_run_the_request_at_all() -> None:
    engines = [Engine(0, "a", cap=2, slots=2), Engine(1, "b", cap=4, slots=4), Engine(2, "c", cap=8, slots=8)]
    for engine, running in zip(engines, (0, 3, 4), strict=True):
        for _ in range(running):
            engine.load.start(work(1, 100, 0.0, observable=True), 0.0)
    bound: list[int] = []
    for sequences, emptiest in ((2, 0), (3, 2), (5, 2)):
        scan = QueueScan(engines, Written("abc"), CAPACITY, [True] * 3, NOW, lambda _, at, __: bound.append(at))
        scan._take_emptiest(ticket(Demand("m", sequences=sequences)), range(3))
        assert bound.pop() == emptiest if bound else scan.held[emptiest] == inf
