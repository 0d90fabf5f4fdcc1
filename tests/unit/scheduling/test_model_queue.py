"""The order of a model's queue."""

from gateway.core.scheduling.fair_share import Tenants
from gateway.core.scheduling.wait_queue import ModelQueue, Ticket
from tests.unit.scheduling.builders import ask, ticket

NOW, STARVATION_SECONDS = 100.0, 30.0


class Scene:
    """A queue; tickets are named by the order in which they join, which is also their turn."""

    def __init__(self) -> None:
        self.tenants = Tenants()
        self.line = ModelQueue(self.tenants, 0.0)
        self.names: dict[Ticket, str] = {}
        self.now = NOW

    def join(
        self, *names: str, tokens: int = 100, waited: float = 1.0, weight: float = 1.0, turn: float | None = None
    ) -> None:
        """The first letter is the tenant; a capital one sends batch requests."""
        for name in names:
            wish = ask(tenant=name[0].lower(), batch=name[0].isupper(), prompt_tokens=tokens, weight=weight)
            joining = ticket(wish, NOW - waited, turn=float(len(self.names)) if turn is None else turn)
            self.names[joining] = name
            self.tenants.arrived(wish, joining.arrived_seconds)
            self.line.join(joining)

    def order(self, count: int = 64) -> str:
        return " ".join(self.names[waiting] for waiting in self.line.in_order(count))

    @property
    def starving(self) -> list[str]:
        """Those that starve, the next one first."""
        return [self.names[waiting] for waiting in self.line.starving(self.now - STARVATION_SECONDS)]

    @property
    def next_starving(self) -> str:
        return next(iter(self.starving), "")

    def serve(self, name: str = "") -> str:
        """This one goes to an engine because it starves; or the first one."""
        [first] = [waiting for waiting in self.line if self.names[waiting] == name] if name else self.line.in_order(1)
        self.line.serve(first, self.now, starving=bool(name))
        self.line.leave(first)
        self.tenants.bound(self.tenants.of(first.demand), first.demand, 1, first.tokens, False)
        return self.names[first]


def test_one_tenants_requests_come_by_turn_however_many_wait() -> None:
    scene = Scene()
    scene.join(*(f"a{number}" for number in range(100)))
    scene.join("a-last", turn=-1.0)
    assert scene.order(3) == "a-last a0 a1"


def test_between_equal_turns_the_first_to_come_is_first() -> None:
    scene = Scene()
    scene.join("a1", "a2", "a3", turn=5.0)
    scene.join("a4", turn=1.0)
    assert scene.order() == "a4 a1 a2 a3"


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


def test_requests_that_starve_are_found_by_tenant_in_fair_order_the_oldest_of_each_first() -> None:
    scene = Scene()
    scene.join("a1", "a2", waited=32.0, turn=9.0)
    scene.join("b1", waited=31.0)
    scene.join("a3", "c1", "D1")
    assert scene.starving == ["a1", "a2", "b1"]
    scene.line.leave(next(iter(scene.line)))
    scene.tenants.bound(scene.tenants.of(ask(tenant="a")), ask(tenant="a"), 1, 500.0, False)
    assert scene.starving == ["b1", "a2"]


def test_the_class_that_has_waited_longest_is_served_for_it_first() -> None:
    scene = Scene()
    scene.join("A1", waited=33.0)
    scene.join("a1", "b1", waited=32.0)
    assert scene.starving == ["A1"]
    scene.line.leave(next(iter(scene.line)))
    assert scene.starving == ["a1", "b1"]


def test_requests_that_starve_are_served_an_eighth_as_many_tokens_as_the_others() -> None:
    scene = Scene()
    scene.join(*(f"a starving {number}" for number in range(40)), waited=31.0, turn=1e9)
    scene.join(*(f"a{number}" for number in range(100)))
    served = [scene.serve(scene.next_starving) for _ in range(45)]
    assert [number for number, name in enumerate(served) if "starving" in name] == [0, 9, 18, 27, 36]


def test_a_long_prompt_that_starved_is_followed_by_eight_times_as_many_tokens_of_others() -> None:
    scene = Scene()
    scene.join("a1", "a2", tokens=1000, waited=31.0, turn=1e9)
    scene.join(*(f"a{number}" for number in range(3, 100)), tokens=200)
    assert scene.serve("a1") == "a1"
    for _ in range(40):
        assert scene.starving == []
        scene.serve()
    assert scene.starving == ["a2"]


def test_after_the_starvation_time_the_next_one_is_served_though_no_others_were() -> None:
    scene = Scene()
    scene.join("a1", "a2", waited=31.0)
    scene.serve("a1")
    assert scene.starving == []
    scene.now += STARVATION_SECONDS
    assert scene.starving == []
    scene.now += 0.1
    assert scene.starving == ["a2"]


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
    assert ahead(ask(tenant="a"), 3.5) == 4 + 1
