"""One budget for the memory that requests hold: request bodies, uploads, queued requests and collected answers."""

from gateway.errors import MemoryFull

_RETRY_AFTER_SECONDS = 1.0


class MemoryBudget:
    """Counts the bytes that all requests hold together, and refuses to go over the limit."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def __repr__(self) -> str:
        return f"<MemoryBudget {self.used_bytes} of {self.limit_bytes} bytes>"

    def take(self, size_bytes: int) -> None:
        """Reserve bytes. Raises MemoryFull, and reserves nothing, if they exceed the limit."""
        used_bytes = self.used_bytes + size_bytes
        if used_bytes > self.limit_bytes:
            raise MemoryFull(
                f"Memory budget exceeded: {self.used_bytes} of {self.limit_bytes} bytes are in use, and"
                f" {size_bytes} more are needed. Retry later, or raise server.memory_budget_bytes.",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        self.used_bytes = used_bytes

    def give_back(self, size_bytes: int) -> None:
        """Release reserved bytes."""
        self.used_bytes -= size_bytes


class Holding:
    """The bytes that one holder has reserved. A `with` block, or `release`, gives all of them back."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Reserve more. Raises MemoryFull."""
        self._budget.take(size_bytes)
        self.size_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Give a part back, at most what is held: after `release` this does nothing."""
        size_bytes = min(size_bytes, self.size_bytes)
        self._budget.give_back(size_bytes)
        self.size_bytes -= size_bytes

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self._budget.give_back(self.size_bytes)
        self.size_bytes = 0

    def __enter__(self) -> "Holding":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
