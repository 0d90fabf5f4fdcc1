"""What replicas share, as values: a small table with a record for each replica, changed by compare-and-swap.

A store holds the table of one fleet. Every change is one atomic call, which has no effect if another replica changed
the table since it was read. So the rules (`blocks.py`) are plain functions of values, and any store that can compare
and swap will do: Redis or Valkey here, or a parent process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """The table at one moment. `present`: the replicas that have a connection open to this very process, kept for
    nothing else; the operating system closes it when the replica's process ends. `era`: the version of its first
    change, by which a table that was lost is told from one that went on; empty = it is new."""

    stamp: Stamp
    era: str = ""
    settled: bool = False  # long enough in use for every replica to be in it, or not to use anything
    records: Mapping[str, bytes] = field(default_factory=dict)
    present: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TableChange:
    """A replica's change of the table: records to set, and replicas to remove. `version`: never used before."""

    expected: Stamp
    version: str
    settled: bool
    records: Mapping[str, bytes]
    removed: tuple[str, ...] = ()


class FleetStore(Protocol):
    """The table of a fleet. Raises StoreLost."""

    async def read(self) -> Table:
        """The table now, after a round trip."""

    async def swap(self, change: TableChange) -> tuple[bool, Table]:
        """Apply the change if the table is as expected; returns whether it was, and the table afterwards."""
