"""The last requests and the last failed ones, kept as the records that the metrics and the access log get, too.

A record is turned into a row only when somebody watches: without, a batch of records costs two calls.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import orjson

from gateway.core.observe.log import LineForm
from gateway.core.observe.record import Record

MOST_RECENT: Final = 200
_COMPLETED = "completed"


class RecentRequests:
    """Keeps the last requests, oldest first. `offset_seconds`: from the loop's clock to Unix time."""

    def __init__(self, offset_seconds: Callable[[], float]) -> None:
        self._offset_seconds = offset_seconds
        self._records: deque[Record] = deque(maxlen=MOST_RECENT)
        self._failed: deque[Record] = deque(maxlen=MOST_RECENT)
        self.count = 0  # of all requests since the start

    def add(self, records: list[Record]) -> None:
        """Take over a batch of requests that have ended."""
        self.count += len(records)
        self._records.extend(records)
        self._failed.extend([record for record in records if record.outcome != _COMPLETED])

    def since(self, count: int) -> list[Record]:
        """Those that ended after so many, as far as they are kept."""
        fresh = min(self.count - count, len(self._records))
        return list(self._records)[len(self._records) - fresh :] if fresh > 0 else []

    def rows(self, count: int = 0) -> list[orjson.Fragment]:
        """The same with the keys of the access log, as JSON; `time` in seconds since 1970."""
        return [*self._as_rows(self.since(count))]

    def failed_rows(self) -> list[orjson.Fragment]:
        """The last requests that were not completed, which may be older than the last requests."""
        return [*self._as_rows(self._failed)]

    def _as_rows(self, records: Iterable[Record]) -> Iterator[orjson.Fragment]:
        offset_seconds, form = self._offset_seconds(), LineForm(("tenant", "class"))
        for record in records:
            line = form.line(record, round(offset_seconds + record.ended_seconds, 3))
            yield orjson.Fragment(line.rstrip())  # a newline would end an event's line
