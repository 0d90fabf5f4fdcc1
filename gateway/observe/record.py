"""What is remembered of one request, for metrics, the access log and learning. No prompts, no keys.

Ended requests are counted and logged in batches: done in a row, the same work costs a third.
"""

from collections.abc import Callable

from gateway.request import Ask, Usage
from gateway.supervisor import Supervisor


class Record:
    """One request's story. Times are the loop's clock, in seconds; None = did not happen.

    Defaults stand in the class, so that making one costs only what is set.
    """

    model: str = ""
    client: str = ""
    backend: str = ""
    outcome: str = ""
    status: int = 0
    attempts: int = 0
    streams: bool = False
    batch: bool = False
    queue_seconds: float = 0.0
    first_byte_seconds: float | None = None
    ended_seconds: float = 0.0
    predicted_hit_tokens: int = 0
    actual_hit_tokens: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_inputs: int | None = None  # of embeddings: not computed for this request; None = none could be
    streamed_tokens: int = 0  # at least so many came, also of an answer that was cut short
    error: str = ""
    ask: Ask | None = None
    engine_index: int = 0
    usage: Usage | None = None
    held_up: bool = False  # the client took its answer more slowly than it came

    def __init__(self, request_id: str, endpoint: str, arrived_seconds: float, request_bytes: int = 0) -> None:
        self.request_id = request_id
        self.endpoint = endpoint
        self.arrived_seconds = arrived_seconds
        self.request_bytes = request_bytes


_BATCH = 64


class RecordBatcher:
    """Collects records and hands each to every consumer, 64 at a time or when asked to."""

    def __init__(self, supervisor: Supervisor, *consumers: Callable[[Record], None]) -> None:
        self._supervisor = supervisor
        self._consumers = consumers
        self._records: list[Record] = []

    def add(self, record: Record) -> None:
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
