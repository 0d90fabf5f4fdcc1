"""Two kinds of lists share one model's slots, and neither keeps the other out."""

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from gateway.features.embeddings.batching import BulkSlots, PendingBatch

SHARE = 48


class Lists:
    """One kind of lists: pieces that wait, and pieces under way."""

    sizes: Any = SimpleNamespace(bulk_share=SHARE)

    def __init__(self, slots: BulkSlots, every_kind: "list[Lists]") -> None:
        self.waiting: list[int] = []
        self.under_way: list[int] = []
        self.slots = slots
        self.every_kind = every_kind  # the one that took slots last is at the end
        every_kind.append(self)

    @property
    def next_items(self) -> int:
        return self.waiting[0] if self.waiting else 0

    def come(self, items: int) -> None:
        self.waiting.append(items)
        self.look()

    def look(self) -> None:
        kinds = cast(list[PendingBatch], self.every_kind)
        while self.waiting and self.waiting[0] <= self.slots.left(cast(PendingBatch, self), kinds):
            items = self.waiting.pop(0)
            self.under_way.append(items)
            self.slots.take(cast(PendingBatch, self), items)
            self.every_kind.remove(self)
            self.every_kind.append(self)

    def end(self) -> None:
        self.slots.give_back(self.under_way.pop(0))
        for kind in list(self.every_kind):
            kind.look()


def two_kinds(slots: BulkSlots) -> tuple[Lists, Lists]:
    kinds: list[Lists] = []
    return Lists(slots, kinds), Lists(slots, kinds)


def test_two_kinds_of_lists_keep_to_one_share() -> None:
    slots = BulkSlots()
    inputs, documents = two_kinds(slots)
    for _ in range(6):
        inputs.come(16)
        documents.come(16)
    assert slots.items == SHARE
    assert sorted((sum(inputs.under_way), sum(documents.under_way))) == [16, 32]


def test_slots_that_come_free_go_to_the_other_kind_first() -> None:
    slots = BulkSlots()
    inputs, documents = two_kinds(slots)
    for _ in range(9):
        inputs.come(16)
    documents.come(16)
    assert (sum(inputs.under_way), sum(documents.under_way)) == (48, 0)
    inputs.end()
    assert (sum(inputs.under_way), sum(documents.under_way)) == (32, 16)


def test_a_flood_of_small_pieces_does_not_keep_a_large_one_out() -> None:
    slots = BulkSlots()
    small, large = two_kinds(slots)
    for _ in range(100):
        small.come(4)
    large.come(40)
    ended = 0
    while not large.under_way:
        small.end()
        ended += 1
    assert ended == 10
    assert slots.items == SHARE


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["come", "end"]), st.integers(1, 60)), max_size=200))
def test_all_go_in_the_end_and_the_share_is_kept(steps: list[tuple[int, str, int]]) -> None:
    slots = BulkSlots()
    kinds = two_kinds(slots)

    def check() -> None:
        under_way = [*kinds[0].under_way, *kinds[1].under_way]
        assert slots.items == sum(under_way)
        assert slots.items <= SHARE or len(under_way) == 1
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
    assert slots.items == 0
