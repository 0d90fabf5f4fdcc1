"""A prefix record whose changes are collected, for other gateways before the same engines to make the same changes.

A block is held by an engine once any gateway sent it there, so records can be joined. Forgetting cannot be joined: each
time that an engine's blocks are forgotten, its generation grows by one. Blocks of an earlier generation are ignored,
and a gateway that receives a later one forgets all its blocks of the engine.
"""

from typing import Final, NamedTuple

from gateway.core.routing.cache_view import PrefixIndex

_SUPERSEDED: Final = (0,)
MOST_CHANGES: Final = 20_000  # that are collected: more than a gateway makes between two announcements


class RecordChange(NamedTuple):
    """An engine was sent a prompt with these blocks; without any, its known blocks are forgotten.

    A single block of size 0 is the last one of a prompt whose answer was part of a longer prompt.
    """

    engine: int
    keys: tuple[int, ...]
    edges: tuple[int, ...]


class AnnouncedIndex(PrefixIndex):
    """The own record of a gateway with peers. `record` and `wipe` are announced; copied changes are not."""

    def __init__(self, most_changes: int = MOST_CHANGES) -> None:
        super().__init__([])
        self._changes: list[RecordChange] = []
        self._most_changes = most_changes
        self._is_complete = True
        self._generations: dict[int, int] = {}

    def record(self, backend: int, keys: tuple[int, ...], edges: tuple[int, ...]) -> None:
        super().record(backend, keys, edges)
        self._collect(RecordChange(backend, keys, edges))

    def wipe(self, backend: int) -> None:
        super().wipe(backend)
        self._generations[backend] = self.generation(backend) + 1
        self._collect(RecordChange(backend, (), ()))

    def supersede_answer(self, backend: int, prompt_key: int) -> bool:
        is_known = super().supersede_answer(backend, prompt_key)
        if is_known:
            self._collect(RecordChange(backend, (prompt_key,), _SUPERSEDED))
        return is_known

    def generation(self, engine: int) -> int:
        """How often the engine's blocks were forgotten, here or elsewhere."""
        return self._generations.get(engine, 0)

    def follow_generation(self, engine: int, generation: int) -> bool:
        """Hear of a generation: forget the blocks of earlier ones. Returns whether blocks of this one are current."""
        known = self.generation(engine)
        if generation > known:
            super().wipe(engine)
            self.begin(engine)
            self._generations[engine] = generation
        return generation >= known

    def copy(self, engine: int, keys: tuple[int, ...], edges: tuple[int, ...]) -> None:
        """Take over the change of another gateway."""
        if edges == _SUPERSEDED:
            super().supersede_answer(engine, keys[0])
        else:
            super().record(engine, keys, edges)

    def begin(self, engine: int) -> None:
        """Nothing that was collected is about the engine that has this number now."""
        self._generations.pop(engine, None)
        self._changes = [change for change in self._changes if change.engine != engine]

    def changes(self) -> tuple[list[RecordChange], bool]:
        """The changes since the last call, and whether that is all."""
        changes, is_complete = self._changes, self._is_complete
        self._changes, self._is_complete = [], True
        return changes, is_complete

    def _collect(self, change: RecordChange) -> None:
        if len(self._changes) < self._most_changes:
            self._changes.append(change)
        else:
            self._is_complete = False
