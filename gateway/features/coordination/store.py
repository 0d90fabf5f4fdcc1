"""The shared state of replicas, as values: a small table with a record for each replica, changed by compare-and-swap.

A store holds the table of one fleet. Every change is one atomic call, which has no effect if another replica changed
the table since it was read. So the rules (`blocks.py`) are plain functions of values, and any store that can compare
and swap will do: Redis or Valkey (`redis_store.py`), or the parent of several workers (`local_server.py`).
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Protocol


class StoreLost(Exception):
    """The store did not answer in time, or answered with an error; whether the call had an effect is not known."""


class Stamp(NamedTuple):
    """Which state of the table was read. `run`: of the process that holds it, which another process never has: a table
    of another run may have lost changes, and is read as empty. `version`: of the last change; empty = a new table."""

    run: str
    version: str


@dataclass(frozen=True, slots=True)
class Table:
    """The table at one moment. `present`: the replicas with an open connection to this store process, kept only for
    this; the operating system closes it when the replica's process ends. `era`: the version of its first change, which
    distinguishes a lost table from a continued one; empty = it is new."""

    stamp: Stamp
    era: str = ""
    settled: bool = False  # long enough in use for every replica to be in it, or not to use anything
    _: KW_ONLY
    records: Mapping[str, bytes] = field(default_factory=dict)
    present: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TableChange:
    """A replica's change of the table: records to set, and replicas to remove. `version`: never used before."""

    expected: Stamp
    version: str
    settled: bool
    _: KW_ONLY
    records: Mapping[str, bytes]
    removed: tuple[str, ...] = ()


class SharedTable:
    """The table in a process, for one run of it. A change that expects another state, or another run, has no effect."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.records: dict[str, bytes] = {}
        self.version = self.era = ""
        self.settled = False

    def __repr__(self) -> str:
        return f"<SharedTable of run {self.run}: {len(self.records)} records>"

    def read(self, present: frozenset[str]) -> Table:
        """The table now. `present`: the replicas that are connected."""
        return Table(Stamp(self.run, self.version), self.era, self.settled, records=dict(self.records), present=present)

    def swap(self, change: TableChange) -> bool:
        """Apply the change if the table is as it expects; returns whether it was."""
        if change.expected != (self.run, self.version):
            return False
        self.era = self.era or change.version
        self.version, self.settled = change.version, change.settled
        self.records.update(change.records)
        for replica in change.removed:
            self.records.pop(replica, None)
        return True


class FleetStore(Protocol):
    """The table of a fleet. Raises StoreLost."""

    async def read(self) -> Table:
        """The table now, after a round trip."""

    async def swap(self, change: TableChange) -> tuple[bool, Table]:
        """Apply the change if the table is as expected; returns whether it was, and the table afterwards."""
