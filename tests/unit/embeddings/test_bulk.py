"""Two kinds of lists share one model's slots, and neither keeps the other out."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.embeddings.sizes import BulkSlots, BulkTaker

SHARE = 48


class Lists:
    """One kind of lists: pieces that wait, and pieces under way."""

    def __init__(self, slots: BulkSlots) -> None:
        self.waiting: list[int] = []
        self.under_way: list[int] = []
        self.taker: BulkTaker = slots.add(lambda: self.waiting[0] if self.waiting else 0, self.look)

    def come(self, items: int) -> None:
        self.waiting.append(items)
        self.look()

    def look(self) -> None:
        while self.waiting and self.taker.may_take(self.waiting[0], SHARE):
            items = self.waiting.pop(0)
            self.under_way.append(items)
            self.taker.take(items)

    def end(self) -> None:
        self.taker.give_back(self.under_way.pop(0))


def test_two_kinds_of_lists_keep_to_one_share() -> None:
    slots = BulkSlots()
    inputs, documents = Lists(slots), Lists(slots)
    for _ in range(6):
        inputs.come(16)
        documents.come(16)
    assert slots.taken_items == SHARE
    assert sorted((inputs.taker.items, documents.taker.items)) == [16, 32]


def test_slots_that_come_free_go_to_the_other_kind_first() -> None:
    slots = BulkSlots()
    inputs, documents = Lists(slots), Lists(slots)
    for _ in range(9):
        inputs.come(16)
    documents.come(16)
    assert (inputs.taker.items, documents.taker.items) == (48, 0)
    inputs.end()
    assert (inputs.taker.items, documents.taker.items) == (32, 16)


def test_a_flood_of_small_pieces_does_not_keep_a_large_one_out() -> None:
    slots = BulkSlots()
    small, large = Lists(slots), Lists(slots)
    for _ in range(100):
        small.come(4)
    large.come(40)
    ended = 0
    while not large.under_way:
        small.end()
        ended += 1
    assert ended == 10
    assert slots.taken_items == SHARE


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["come", "end"]), st.integers(1, 60)), max_size=200))
def test_all_go_in_the_end_and_the_share_is_kept(steps: list[tuple[int, str, int]]) -> None:
    slots = BulkSlots()
    kinds = [Lists(slots), Lists(slots)]

    def check() -> None:
        under_way = [*kinds[0].under_way, *kinds[1].under_way]
        assert slots.taken_items == sum(under_way) == sum(kind.taker.items for kind in kinds)
        assert slots.taken_items <= SHARE or len(under_way) == 1
        assert under_way or not (kinds[0].waiting or kinds[1].waiting)

    for kind, what, items in steps:
        if what == "come":
            kinds[kind].come(items)
        elif kinds[kind].under_way:
            kinds[kind].end()
        check()
    while busy := [kind for kind in kinds if kind.under_way]:
        busy[0].end()
        check()
    assert slots.taken_items == 0
