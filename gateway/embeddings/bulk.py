"""The slots of a model that long lists may take: one share for lists of inputs and lists of documents, in turn."""

from collections.abc import Callable


class BulkSlots:
    """One model's slots that long lists have taken."""

    def __init__(self) -> None:
        self.taken_items = 0
        self._takers: list[BulkTaker] = []
        self._last: BulkTaker | None = None

    def __repr__(self) -> str:
        return f"<BulkSlots {self.taken_items} taken by {len(self._takers)} kinds>"

    def joined(self, next_items: Callable[[], int], look: Callable[[], None]) -> "BulkTaker":
        """One more kind of lists. `next_items`: slots for which it waits; `look` is called when slots come free."""
        taker = BulkTaker(self, next_items, look)
        self._takers.append(taker)
        return taker

    def taken(self, by: "BulkTaker", items: int) -> None:
        """Slots are taken."""
        self.taken_items += items
        self._last = by

    def given_back(self, by: "BulkTaker", items: int) -> None:
        """Slots come free: the others look first."""
        self.taken_items -= items
        for taker in self._takers:
            if taker is not by:
                taker.look()
        by.look()

    def kept_from(self, taker: "BulkTaker") -> int:
        """Slots that are left to others that wait, because it is their turn."""
        return sum(other.next_items() for other in self._takers if other is not taker) if self._last is taker else 0


class BulkTaker:
    """What one kind of lists takes of them."""

    def __init__(self, slots: BulkSlots, next_items: Callable[[], int], look: Callable[[], None]) -> None:
        self.items = 0
        self.next_items = next_items
        self.look = look
        self._slots = slots

    def __repr__(self) -> str:
        return f"<BulkTaker {self.items} of {self._slots!r}>"

    def left(self, share_items: int) -> int | None:
        """How much of such a share may be taken now; None = any amount, because nothing is taken."""
        slots = self._slots
        return share_items - slots.taken_items - slots.kept_from(self) if slots.taken_items else None

    def may_take(self, items: int, share_items: int) -> bool:
        """Whether so many may be taken now."""
        left = self.left(share_items)
        return left is None or items <= left

    def take(self, items: int) -> None:
        """Take slots."""
        self.items += items
        self._slots.taken(self, items)

    def give_back(self, items: int) -> None:
        """Give slots back."""
        self.items -= items
        self._slots.given_back(self, items)


class BulkShares:
    """Owner of the slots that long lists have taken of each model."""

    def __init__(self) -> None:
        self._models: dict[str, BulkSlots] = {}

    def of(self, model: str) -> BulkSlots:
        """Those of a model that is served."""
        return self._models.setdefault(model, BulkSlots())
