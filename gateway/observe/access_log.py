"""One JSON line a request, written by a thread of its own so that a stuck reader never stops the event loop."""

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import BinaryIO, Self

import orjson

from gateway.observe.prefix_hashes import PrefixHashes
from gateway.observe.record import Record

_MAX_LINES = 65536
_PAUSE_SECONDS = 0.2


class AccessLog:
    """A bounded buffer and its writer. Lines that do not fit are dropped and counted."""

    def __init__(
        self,
        out: BinaryIO,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        prefixes: PrefixHashes | None = None,
    ) -> None:
        self._out = out
        self._prefixes = prefixes
        self._clock = clock
        self._wall_clock = wall_clock
        self._offset_seconds = wall_clock() - clock()  # from the loop's clock to Unix time
        self._lines: deque[bytes] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self.dropped = 0

    def add(self, record: Record) -> None:
        """Log one request."""
        if len(self._lines) >= _MAX_LINES:
            self.dropped += 1
            return
        self._lines.append(line_of(record, self._offset_seconds, self._prefixes))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _write(self) -> None:
        while not self._stop.wait(_PAUSE_SECONDS):
            self._write_out()
        self._write_out()

    def _write_out(self) -> None:
        self._offset_seconds = self._wall_clock() - self._clock()
        lines = self._lines
        batch = [lines.popleft() for _ in range(len(lines))]
        if not batch:
            return
        try:
            self._out.write(b"".join(batch))
            self._out.flush()
        except (OSError, ValueError):
            self.dropped += len(batch)


def line_of(record: Record, offset_seconds: float, prefixes: PrefixHashes | None = None) -> bytes:
    """The line: Unix time, and times in milliseconds since arrival; null where a thing did not happen."""
    ask = record.ask
    prefix = {} if prefixes is None else {"prefix": prefixes.of(ask) if ask is not None and ask.keys else None}
    arrived, first, ended = record.arrived_seconds, record.first_byte_seconds, record.ended_seconds
    return orjson.dumps(
        {
            "time": _thousandths(offset_seconds + ended),
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "model": record.model,
            "client": record.client or None,
            "backend": record.backend or None,
            "outcome": record.outcome,
            "status": record.status,
            "stream": record.streams,
            "attempts": record.attempts,
            "queue_ms": _thousandths(record.queue_seconds * 1000),
            "first_byte_ms": None if first is None else _thousandths((first - arrived) * 1000),
            "duration_ms": _thousandths((ended - arrived) * 1000),
            "request_bytes": record.request_bytes,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "predicted_hit_tokens": record.predicted_hit_tokens,
            "actual_hit_tokens": record.actual_hit_tokens,
            "reused_inputs": record.reused_inputs,
            "error": record.error or None,
            **prefix,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


def _thousandths(value: float) -> float:
    return int(value * 1000) / 1000  # a third of the cost of round()
