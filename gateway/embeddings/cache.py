"""What was used lately, within a number of bytes: whatever was used least lately goes first."""

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")
# What an entry takes besides what its owner counts: a key of 16 bytes, a pair, a link of the list, and places in two
# tables, of which up to five of six are empty; measured for 300 to 300,000 entries.
ENTRY_BYTES = 368


class ByteLru(Generic[Value]):
    """Entries of which each says its size. All of them together never take more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[bytes, tuple[int, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<ByteLru {len(self)} entries, {self.used_bytes} of {self.max_bytes} bytes>"

    def get(self, key: bytes) -> Value | None:
        """The value, which is used now; None = it is not here."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, value: Value, size_bytes: int) -> None:
        """Keep a value of this size, if it fits at all."""
        size = size_bytes + ENTRY_BYTES
        old = self._entries.pop(key, None)
        if old is not None:
            self.used_bytes -= old[0]
        if size > self.max_bytes:
            return
        self._entries[key] = (size, value)
        self.used_bytes += size
        while self.used_bytes > self.max_bytes:
            _, (gone, _) = self._entries.popitem(last=False)
            self.used_bytes -= gone
            self.evictions += 1
