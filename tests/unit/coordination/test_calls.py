"""Whom a replica calls: those who have what it lacks, and those who lack what it gives up."""

from itertools import count

from gateway.features.coordination.blocks import EngineUse, Wish
from gateway.features.coordination.replica import ReplicaBlocks
from tests.unit.coordination.world import Server

CAP = EngineUse(8, 8000)


class Gateways:
    """Replicas that change one table in turn; all see one clock."""

    def __init__(self, *names: str) -> None:
        self.server, self.now, self.versions = Server(), 0.0, map(str, count())
        self.blocks = {name: ReplicaBlocks(name, len(names), lambda: next(self.versions)) for name in names}
        for _ in range(10):
            for name in names:
                self.server.present.add(name)
                self.call(name)

    def call(self, name: str, used: int = 0, wanted: int | None = None) -> ReplicaBlocks:
        """Renew the blocks of one of them; it waits if it wants more than it uses."""
        self.now += 0.5
        blocks, wants = self.blocks[name], used if wanted is None else wanted
        if not blocks.knows_table:
            blocks.saw(self.server.table(), self.now)
        need = EngineUse(min(wants, used + 1), 0) if wants > used else EngineUse(0, 0)
        wish = Wish(EngineUse(used, 0), EngineUse(wants, 0), need, CAP)
        is_applied = False
        while not is_applied:  # others have changed the table meanwhile
            is_applied = self.server.swap(blocks.propose({"e": wish}, float(wants > used), self.now))
            blocks.answered(self.server.table(), self.now, self.now, applied=is_applied)
        return blocks

    def slots(self, name: str) -> int:
        return self.blocks[name].limit("e", CAP, self.now).slots


def test_a_replica_that_lacks_a_slot_calls_those_who_have_more_than_they_need() -> None:
    gateways = Gateways("a", "b", "c")
    assert [gateways.slots(name) for name in "abc"] == [3, 3, 2]
    gateways.call("b", used=3, wanted=4)
    assert gateways.call("c", used=2, wanted=4).rich == {"a"}
    giving = gateways.call("a")
    assert (giving.rich, giving.poor, giving.lacked) == (set(), {"b", "c"}, {"e"})
    gateways.call("b", used=3, wanted=4)
    gateways.call("c", used=2, wanted=4)
    assert [gateways.slots(name) for name in "abc"] == [0, 4, 4]


def test_a_replica_without_waiting_requests_calls_nobody() -> None:
    gateways = Gateways("a", "b")
    gateways.call("a", used=2)
    quiet = gateways.call("b", used=2)
    assert (quiet.rich, quiet.poor, quiet.lacked) == (set(), set(), set())


def test_what_is_given_up_while_another_waits_is_announced_to_it() -> None:
    gateways = Gateways("a", "b")
    gateways.call("a", used=4)
    assert gateways.call("b", used=4, wanted=5).rich == {"a"}
    held = gateways.call("a", used=4)
    assert (held.lacked, held.poor) == ({"e"}, set()), "it has nothing to give, until a request ends"
    giving = gateways.call("a", used=3)
    assert (giving.lacked, giving.poor) == ({"e"}, {"b"})
    gateways.call("b", used=4, wanted=5)
    assert [gateways.slots(name) for name in "ab"] == [3, 5]
