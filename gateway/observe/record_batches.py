"""Requests that have ended, counted and logged in batches: done in a row, the same work costs a third."""

from collections.abc import Callable

from gateway.observe.record import Record
from gateway.supervisor import Supervisor

_BATCH = 64


class RecordBatcher:
    """Collects records and hands each to every consumer, 64 at a time or when asked to."""

    def __init__(self, supervisor: Supervisor, *consumers: Callable[[Record], None]) -> None:
        self._supervisor = supervisor
        self._consumers = consumers
        self._records: list[Record] = []

    def add(self, record: Record) -> None:
        """A request ended."""
        self._records.append(record)
        if len(self._records) >= _BATCH:
            self.settle()

    def settle(self) -> None:
        """Hand on what has been collected. What one consumer raises for one record keeps nothing from the others."""
        records, self._records = self._records, []
        for consume in self._consumers:
            for record in records:
                try:
                    consume(record)
                except Exception as error:
                    self._supervisor.caught("finished_requests", error)
