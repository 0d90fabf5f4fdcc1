"""Short requests and long lists of a group share its model's slots, and the short ones always find some."""

from gateway.embeddings.batching import BatchGroup, Budget, GroupKey
from gateway.embeddings.members import Part
from tests.unit.embeddings.test_sizes import sizes

BUDGET = Budget(64, 8192, 0.005)
KEY = GroupKey("m", b"{", False, "", False)


def group(cap: int = 64, short: int = 0, long: tuple[int, ...] = ()) -> BatchGroup:
    made = BatchGroup(KEY, sizes(cap))
    for _ in range(short):
        made.interactive.join(Part(None, 0, 1, 2, 8), 100.0)
    for items in long:
        made.bulk.join(Part(None, 0, items, 2 * items, 8, alone=True), 100.0)
    return made


def test_long_lists_leave_a_quarter_of_the_slots() -> None:
    made, sent = group(64, short=1, long=(16,) * 9), []
    while made.has_room(made.bulk):
        sent.append(made.take(made.bulk, 100.0, BUDGET))
    assert [flight.items for flight in sent] == [16, 16, 16]
    assert made.has_room(made.interactive)
    made.ended(sent[0])
    assert made.has_room(made.bulk)


def test_a_list_as_long_as_all_slots_goes_when_no_other_is_there() -> None:
    made = group(8, long=(8, 8))
    assert made.has_room(made.bulk)
    first = made.take(made.bulk, 100.0, BUDGET)
    assert not made.has_room(made.bulk)
    made.ended(first)
    assert made.has_room(made.bulk)
    assert made.sizes.bulk.items == 0


def test_it_is_quiet_when_nothing_waits_and_nothing_is_under_way() -> None:
    made = group(short=1)
    assert not made.quiet
    flight = made.take(made.interactive, 100.0, BUDGET)
    assert not made.quiet
    made.ended(flight)
    assert made.quiet


def test_it_is_looked_at_again_when_the_first_of_either_may_be_due() -> None:
    made = group(short=1)
    made.bulk.join(Part(None, 0, 9, 2, 8), 99.999)
    assert made.look_again_seconds(100.0, BUDGET) == 99.999 + 0.005
    assert group().look_again_seconds(100.0, BUDGET) is None
    assert made.gathering(bulk=True) is made.bulk
    assert made.gathering(bulk=False) is made.interactive
