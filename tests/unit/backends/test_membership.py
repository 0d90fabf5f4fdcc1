"""Which backends there are: the file's, changed by hand, over a fleet that lets go what is idle."""

from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet, Wanted
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.membership import BY_HAND, Membership
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import BackendExists, BackendNotFound
from gateway.core.request import Demand
from gateway.core.routing.kv_reservations import Reservation
from gateway.core.turns import at_once

from .conftest import MakeScene, ManualClock, Scene

MOST_AT_ONCE = 32
LISTS_M = Facts(models=(ModelCard("m"),))


def config(name: str, **settings: float) -> BackendConfig:
    return BackendConfig.model_validate({"url": f"http://{name}.example:8000", "name": name, **settings})


def membership(scene: Scene) -> Membership:
    made = Membership(scene.fleet)
    at_once(made.reconcile("file", [Wanted(config(name)) for name in "ab"]))
    scene.fleet.let_go()
    come_up(scene)
    return made


def come_up(scene: Scene) -> None:
    for backend in scene.fleet.backends:
        if backend.health.state != "up":
            scene.fleet.learned(backend, LISTS_M)
            scene.probe(backend, ProbeResult.OK)


def busy(backend: Backend) -> Reservation:
    """A request in flight there."""
    request = Reservation(Demand("m"), 1, 0.0)
    backend.engines[0].load.start(request, 0.0)
    return request


def test_a_backend_that_is_added_serves_once_it_is_up_and_starts_slowly(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    added = made.add(config("c", max_in_flight=100))
    assert (s.serving(), made.origin("c"), made.origin("a")) == ("ab", BY_HAND, "file")
    come_up(s)
    assert s.serving() == "abc"
    assert added.limit(s.clock()) < 100


@pytest.mark.parametrize("taken", [config("a"), BackendConfig(url="http://a.example:8000", name="other")])
def test_a_name_or_an_address_cannot_be_added_twice(scene: MakeScene, taken: BackendConfig) -> None:
    made = membership(scene(2))
    with pytest.raises(BackendExists, match=r"backend 'a' is at http://a\.example:8000"):
        made.add(taken)


def test_a_drained_backend_gets_nothing_new_until_it_is_taken_back(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    made.drain("a")
    assert s.serving() == "b"
    assert s.fleet.by_name["a"].state_since_seconds == s.clock()
    made.drain("b")
    assert (s.serving(), s.fleet.ready) == ("", False)
    assert s.fleet.candidates("m") == []  # it may be back: requests are held
    made.undrain("a")
    assert s.serving() == "a"


def test_a_backend_leaves_when_its_last_request_has_ended(scene: MakeScene) -> None:
    s, left = scene(2), list[str]()
    made = membership(s)
    s.fleet.on_leave.append(lambda backend: left.append(backend.name))
    backend = s.fleet.by_name["a"]
    request = busy(backend)
    made.remove("a")
    s.fleet.let_go()
    assert (s.serving(), s.fleet.leaving, left) == ("b", (backend,), [])
    assert s.fleet.owner(backend.engines[0].index) is backend
    backend.engines[0].load.finish(request, 1.0)
    s.fleet.let_go()
    s.fleet.let_go()
    assert (s.fleet.leaving, left) == ((), ["a"])


def test_what_does_not_exist_is_named_with_what_does(scene: MakeScene) -> None:
    made = membership(scene(2))
    for change in (made.remove, made.drain, made.undrain):
        with pytest.raises(BackendNotFound, match=r"No backend is named 'x'\. Backends: a, b\."):
            change("x")


def test_a_source_that_is_read_again_undoes_nothing_that_was_done_by_hand(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    made.add(config("c"))
    made.remove("a")
    made.drain("b")
    come_up(s)
    changes = at_once(made.reconcile("file", [Wanted(config(name)) for name in "abd"]))
    assert (changes.added, changes.removed, changes.changed, changes.replaced) == (["d"], [], [], [])
    assert sorted(s.fleet.by_name) == ["b", "c", "d"]
    assert s.fleet.by_name["b"].draining == BY_HAND
    assert made.removed == ["a"]
    made.add(config("a"))  # takes the removal back
    assert (made.removed, made.origin("a")) == ([], "file")
    at_once(made.reconcile("file", [Wanted(config(name)) for name in "bc"]))
    assert made.origin("c") == "file"
    at_once(made.reconcile("file", [Wanted(config("b"))]))
    assert sorted(s.fleet.by_name) == ["b"]


def test_other_settings_of_the_same_server_keep_what_is_known_of_it(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    backend = s.fleet.by_name["a"]
    changes = at_once(
        made.reconcile("file", [Wanted(config("a", max_in_flight=7, relative_cost=4.0)), Wanted(config("b"))])
    )
    assert changes.changed == ["a"]
    assert s.fleet.by_name["a"] is backend
    assert (backend.cap, backend.engines[0].slots, backend.engines[0].relative_cost) == (7, 7, 4.0)
    assert s.serving() == "ab"


def test_another_address_is_another_backend_while_the_old_one_ends_its_requests(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    old = s.fleet.by_name["a"]
    request = busy(old)
    new = BackendConfig(url="http://elsewhere.example:8000", name="a")
    changes = at_once(made.reconcile("file", [Wanted(new), Wanted(config("b"))]))
    assert (changes.replaced, changes.added, changes.removed) == (["a"], [], [])
    come_up(s)
    assert s.serving() == "ab"
    assert s.fleet.leaving == (old,)
    assert s.fleet.by_name["a"].engines[0].index != old.engines[0].index
    old.engines[0].load.finish(request, 1.0)
    s.fleet.let_go()
    assert s.fleet.leaving == ()


def test_one_server_is_one_backend_whatever_sources_call_it(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    found = [BackendConfig(url="http://a.example:8000"), BackendConfig(url="http://d.example:8000")]
    made.add(config("c"))
    at_once(made.reconcile("dns", [Wanted(each) for each in (*found, BackendConfig(url="http://c.example:8000"))]))
    assert list(s.fleet.by_name) == ["a", "b", "d.example:8000", "c"]
    assert made.origin("d.example:8000") == "dns"
    made.remove("d.example:8000")
    at_once(made.reconcile("dns", []))
    at_once(made.reconcile("dns", [Wanted(each) for each in found]))
    assert list(s.fleet.by_name) == ["a", "b", "d.example:8000", "c"]  # a removal ends with the listing


def test_the_zone_of_a_backend_is_what_its_first_source_says(scene: MakeScene) -> None:
    made = membership(scene(2))
    at_once(made.reconcile("kubernetes", [Wanted(config("b"), zone="zone-b"), Wanted(config("c"), zone="zone-c")]))
    at_once(made.reconcile("dns", [Wanted(config("c"))]))
    assert [made.zone(name) for name in "abcx"] == ["", "", "zone-c", ""]


def test_one_that_a_source_drains_gets_nothing_new_and_keeps_what_is_known_of_it(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    backend = s.fleet.by_name["a"]
    at_once(made.reconcile("file", [Wanted(config("a"), "not ready"), Wanted(config("b"))]))
    assert (s.serving(), backend.draining) == ("b", "not ready")
    made.undrain("a")
    assert backend.draining == "not ready"
    at_once(made.reconcile("file", [Wanted(config("a")), Wanted(config("b"))]))
    assert (s.serving(), s.fleet.by_name["a"], backend.slow_since_seconds) == ("ab", backend, None)


def test_numbers_of_engines_are_used_again_but_not_soon(scene: MakeScene) -> None:
    s = scene(2)
    made = membership(s)
    for turn in range(50):
        made.add(config(f"pod-{turn}"))
        made.remove(f"pod-{turn}")
        s.fleet.let_go()
        s.clock.now += 30.0
    highest = made.add(config("last")).engines[0].index
    assert highest < 10


class Changes(RuleBasedStateMachine):
    """Sources and hands change the fleet in any order, while requests come and end."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.fleet = Fleet([config("a")], HealthConfig(), clock=self.clock, random=Random(1))
        self.membership = Membership(self.fleet)
        self.listed, self.by_hand, self.removed, self.drained = {"a"}, set[str](), set[str](), set[str]()
        self.requests: list[tuple[Backend, Reservation]] = []

    @rule(names=st.sets(names))
    def read(self, names: set[str]) -> None:
        at_once(self.membership.reconcile("file", [Wanted(config(name)) for name in sorted(names)]))
        self.listed, self.by_hand, self.removed = names, self.by_hand - names, self.removed & names
        self.drained &= self.present

    @rule(name=names)
    def add(self, name: str) -> None:
        if name in self.present:
            with pytest.raises(BackendExists):
                self.membership.add(config(name))
        else:
            self.membership.add(config(name))
            self.removed.discard(name)
            self.by_hand |= {name} - self.listed

    @rule(name=names)
    def remove(self, name: str) -> None:
        if name in self.present:
            self.membership.remove(name)
            self.by_hand.discard(name)
            self.removed |= {name} & self.listed
            self.drained.discard(name)

    @rule(name=names, back=st.booleans())
    def drain(self, name: str, back: bool) -> None:
        if name in self.present:
            (self.membership.undrain if back else self.membership.drain)(name)
            (self.drained.discard if back else self.drained.add)(name)

    @rule(name=names)
    def send(self, name: str) -> None:
        if name in self.present:
            backend = self.fleet.by_name[name]
            self.requests.append((backend, busy(backend)))

    @rule()
    def end(self) -> None:
        if self.requests:
            backend, request = self.requests.pop(0)
            assert self.fleet.owner(backend.engines[0].index) is backend
            backend.engines[0].load.finish(request, 1.0)

    @rule(seconds=st.sampled_from((1.0, 100.0)))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.fleet.let_go()

    @property
    def present(self) -> set[str]:
        return (self.listed | self.by_hand) - self.removed

    @invariant()
    def the_fleet_is_what_is_wanted(self) -> None:
        assert set(self.fleet.by_name) == self.present
        assert {backend.name for backend in self.fleet.backends if backend.draining} == self.drained
        assert set(self.membership.removed) == self.removed

    @invariant()
    def no_engine_is_lost_and_none_has_the_number_of_another(self) -> None:
        held = {backend for backend, _ in self.requests}
        assert held <= {*self.fleet.backends, *self.fleet.leaving}
        numbers = [each.engines[0].index for each in (*self.fleet.backends, *self.fleet.leaving)]
        assert len(set(numbers)) == len(numbers)


TestChanges = Changes.TestCase


def sources(many: int, first: int = 0) -> list[Wanted]:
    return [Wanted(config(f"b{number}")) for number in range(first, first + many)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sources(0), sources(1000)),
        (sources(1000), sources(1)),
        (sources(1000), sources(1000, 500)),
        (sources(1000), sources(0)),
        (sources(200), [Wanted(each.config, "not ready") for each in sources(200)]),
        (
            sources(200),
            [Wanted(each.config.model_copy(update={"name": f"other-{each.config.name}"})) for each in sources(200)],
        ),
    ],
    ids=["arrive", "leave", "half are others", "all leave", "all drain", "all are renamed"],
)
def test_a_list_of_many_is_applied_a_few_at_a_time(before: list[Wanted], after: list[Wanted]) -> None:
    fleet = Fleet([], HealthConfig(), clock=ManualClock(), random=Random(0))
    made = Membership(fleet)
    at_once(made.reconcile("file", before))
    known, steps, reported = dict(fleet.by_name), made.reconcile("file", after), None
    fewest = min(len(before), len(after))
    while reported is None:
        try:
            next(steps)
        except StopIteration as end:
            reported = end.value
        now = dict(fleet.by_name)
        assert len(known.keys() ^ now.keys()) <= 2 * MOST_AT_ONCE
        assert len({backend.config.url for backend in fleet.backends}) == len(now) >= fewest
        known = now
    assert [*known] == [each.config.name for each in after]
    assert [backend.draining for backend in fleet.backends] == [each.draining for each in after]
    names = {each.config.name for each in before}, {each.config.name for each in after}
    assert (set(reported.added), set(reported.removed)) == (names[1] - names[0], names[0] - names[1])
