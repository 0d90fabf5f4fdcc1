"""The order of a model's queue."""

from gateway.scheduling.fair_share import Tenants
from gateway.scheduling.wait_queue import ModelQueue, ScanOrder, Ticket
from tests.unit.scheduling.builders import ask

NOW, STARVATION_SECONDS = 100.0, 30.0


class Scene:
    """A queue; tickets are named by the order in which they join, which is also their turn."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.line = ModelQueue(self.tenants, 0.0)
        self.names: dict[Ticket, str] = {}
        self.now = NOW

    def join(self, *names: str, tokens: int = 100, waited: float = 1.0, weight: float = 1.0) -> None:
        """The first letter is the tenant; a capital one sends batch requests."""
        for name in names:
            wish = ask(tenant=name[0].lower(), batch=name[0].isupper(), prompt_tokens=tokens, weight=weight)
            ticket = Ticket(wish, NOW - waited, frozenset(), 0.0)
            ticket.turn = float(len(self.names))
            self.names[ticket] = name
            self.tenants.arrived(wish, ticket.arrived_seconds)
            self.line.join(ticket)

    def order(self, count: int = 64, *, by_turn: bool = True) -> str:
        order = ScanOrder(count, self.now - STARVATION_SECONDS, by_turn)
        return " ".join(self.names[ticket] for ticket in self.line.in_order(order))

    def serve(self) -> str:
        """The first goes to an engine."""
        order = ScanOrder(1, self.now - STARVATION_SECONDS, by_turn=True)
        [ticket] = self.line.in_order(order)
        self.line.serve(ticket, order)
        self.line.leave(ticket)
        self.tenants.bound(self.tenants.of(ticket.demand), ticket.demand, 1, ticket.tokens, False)
        return self.names[ticket]


def test_one_tenants_requests_come_by_turn_and_those_that_starve_first() -> None:
    scene = Scene()
    scene.join("a1", waited=31.0)
    scene.join("a2", "a3")
    for turn, ticket in zip((9.0, 5.0, 1.0), scene.names, strict=True):
        ticket.turn = turn
    assert scene.order() == "a1 a3 a2"
    assert scene.order(2) == "a1 a2"  # the third was not looked at
    assert scene.order(by_turn=False) == "a1 a2 a3"


def test_tenants_take_turns_however_many_requests_each_has() -> None:
    scene = Scene()
    scene.join("a1", "a2", "a3", "a4", "b1", "b2")
    assert scene.order() == "a1 b1 a2 b2 a3 a4"
    assert scene.order(3) == "a1 b1 a2"


def test_turns_are_by_tokens_and_weight() -> None:
    scene = Scene()
    scene.join("a1", "a2", "a3", tokens=1000)
    scene.join("b1", "b2", "b3", "b4", tokens=500)
    scene.join("c1", "c2", "c3", "c4", "c5", tokens=1000, weight=4.0)
    assert scene.order(9) == "a1 b1 c1 c2 b2 c3 c4 a2 b3"


def test_a_heavy_tenant_has_its_share_of_a_scan_however_many_tenants_wait() -> None:
    scene = Scene()
    scene.join(*(f"a{number}" for number in range(12)), weight=10.0)
    scene.join("b1", "b2")
    scene.join("c1", "c2")
    assert scene.order(12).count("a") == 10


def test_the_scanned_part_is_what_is_served() -> None:
    scene = Scene()
    scene.join("a1", "a2", "a3", tokens=700)
    scene.join("b1", "b2", "b3", tokens=200)
    scene.join("c1", "c2", weight=3.0)
    expected = scene.order()
    assert " ".join(scene.serve() for _ in range(8)) == expected


def test_a_tenant_that_comes_later_is_next_and_has_no_more_than_its_share() -> None:
    scene = Scene()
    scene.join(*(f"a{number}" for number in range(9)))
    for _ in range(5):
        scene.serve()
    scene.join("b0", "b1")
    assert scene.order() == "b0 a5 b1 a6 a7 a8"


def test_interactive_requests_come_before_batch_ones_of_any_tenant() -> None:
    scene = Scene()
    scene.join("A1", "A2", "a3", "B4", "b5")
    assert scene.order() == "a3 b5 A1 B4 A2"


def test_batch_requests_share_what_is_left_by_weight() -> None:
    scene = Scene()
    scene.join("A1", "A2", "A3")
    scene.join("B1", "B2", "B3", weight=2.0)
    assert scene.order() == "A1 B1 B2 A2 B3 A3"


def test_batch_requests_that_starve_take_part_as_one_more_tenant() -> None:
    scene = Scene()
    scene.join("A1", "A2", "B1", "B2", waited=31.0)
    scene.join("A3", "a1", "a2", "c1", "c2")
    assert scene.order() == "a1 c1 A1 a2 c2 B1 A2 B2 A3"
    served = [scene.serve() for _ in range(9)]
    assert served == ["a1", "c1", "A1", "a2", "c2", "B1", "A2", "B2", "A3"]


def test_a_removed_ticket_is_not_in_the_queue_and_cannot_be_removed_again() -> None:
    scene = Scene()
    scene.join("a1", "b1")
    first, second = scene.names
    assert scene.line.leave(first)
    assert not scene.line.leave(first)
    assert scene.order() == "b1"
    assert scene.line.leave(second)
    assert (len(scene.line), list(scene.line), scene.order()) == (0, [], "")
    assert (scene.tenants.waiting, scene.tenants.waiting_tenants, scene.tenants.waiting_batch) == (0, 0, 0)


def test_how_many_come_before_a_new_request_depends_on_its_tenant() -> None:
    scene = Scene()
    scene.join(*(f"a{number}" for number in range(9)))
    scene.join("b1", "C1", "C2")
    ahead = scene.line.ahead
    assert ahead(ask(tenant="a")) == 9 + 1
    assert ahead(ask(tenant="b")) == 1 + 2
    assert ahead(ask(tenant="new")) == 1 + 1
    assert ahead(ask(tenant="new", weight=0.25)) == 4 + 1
    assert ahead(ask(tenant="new", batch=True)) == 10 + 1
    assert ahead(ask(tenant="c", batch=True)) == 10 + 2


def test_batch_requests_that_begin_to_starve_have_no_credit_for_the_time_before() -> None:
    scene = Scene()
    scene.join(*(f"a{number}" for number in range(20)))
    scene.join("B1", "B2", "B3", "B4")
    for _ in range(9):
        scene.serve()
    scene.now += 30.0
    scene.line.leave(next(ticket for ticket, name in scene.names.items() if name == "B1"))
    assert [scene.serve()[0] for _ in range(6)] == ["B", "a", "B", "a", "B", "a"]
