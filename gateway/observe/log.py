"""The logs: JSON lines of the process on standard error, and the access log with one JSON line a request.

Threads write the lines, so that a reader that hangs or is gone never stops the event loop.
"""

import io
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from hashlib import blake2b, sha256
from typing import Any, BinaryIO, Final, Self, TextIO, TypeVar, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

from gateway._native import json_line, json_line_in_python
from gateway.observe.record import Record
from gateway.request import Demand

MAX_HELD_BYTES = 33554432
_LINE_OVERHEAD_BYTES = 64  # that a short line takes in memory beside its text
_SLICE_BYTES = 65536
_PAUSE_SECONDS = 0.2
_EXIT_SECONDS = 2.0
Made = TypeVar("Made")


class LineWriter:
    """A bounded queue and its writer, which runs inside the `with` block. What does not fit is dropped and counted.

    `out` must be unbuffered: what Python buffered would be written at its exit, which then waits for the reader.
    """

    def __init__(self, out: BinaryIO, name: str) -> None:
        self.dropped = 0
        self._out = out
        self._lock = threading.RLock()  # a finalizer may log while its thread is in here
        self._lines: deque[bytes] = deque()
        self._held_bytes = 0
        self._torn = False  # the last line was not written to its end
        self._stop = threading.Event()
        self._writer_thread = threading.Thread(target=self._run, name=name, daemon=True)

    def write(self, lines: bytes, count: int = 1) -> None:
        """Queue a line, or several, with their newlines. Never waits for the reader, never raises."""
        size = len(lines) + _LINE_OVERHEAD_BYTES
        with self._lock:
            if self._held_bytes + size > MAX_HELD_BYTES:
                self.dropped += count
            else:
                self._held_bytes += size
                self._lines.append(lines)

    def __enter__(self) -> Self:
        self._writer_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._writer_thread.join(_EXIT_SECONDS)  # a reader that hangs keeps the thread, not the process

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_SECONDS):
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        while lines := self._taken():
            ending = b"\n" if self._torn else b""
            data = ending + b"".join(lines)
            done = self._write_out(data)
            if done:
                self._torn = done < len(data) and data[done - 1 : done] != b"\n"
            with self._lock:
                self.dropped += data.count(b"\n", max(done, len(ending)))

    def _taken(self) -> list[bytes]:
        taken, size = list[bytes](), 0
        with self._lock:
            while self._lines and size < _SLICE_BYTES:
                line = self._lines.popleft()
                taken.append(line)
                size += len(line)
                self._held_bytes -= len(line) + _LINE_OVERHEAD_BYTES
        return taken

    def _write_out(self, data: bytes) -> int:
        """Gives how many bytes could be written."""
        out: Any = self._out  # a non-blocking pipe that is full gives None, which the type does not say
        done = 0
        while done < len(data):
            try:
                written = out.write(memoryview(data)[done:])
            except (OSError, ValueError):  # gone, full, or closed
                break
            if written:
                done += written
            elif self._stop.wait(_PAUSE_SECONDS):
                break
        return done


_STEPS: tuple[Any, ...] = (
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
    structlog.processors.format_exc_info,
    structlog.processors.JSONRenderer(),
)


@contextmanager
def logging_to(out: BinaryIO) -> Iterator[LineWriter]:
    """Log to `out` while the block runs, and with it all other output to standard error: asyncio's messages,
    warnings, tracebacks of threads. `out` must be unbuffered.
    """
    with LineWriter(out, "log") as writer:
        stream = QueuedText(writer)
        structlog.configure(
            processors=[rendered],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
            logger_factory=structlog.WriteLoggerFactory(cast(TextIO, stream)),
        )
        with redirect_stderr(stream):
            yield writer


def rendered(logger: WrappedLogger, name: str, event: EventDict) -> str:
    """The line of an event. What cannot be rendered is logged without its values: logging raises nothing."""
    words = str(event.get("event"))
    try:
        line: Any = event
        for step in _STEPS:
            line = step(logger, name, line)
        return str(line)
    except Exception as error:
        return json.dumps({"event": words, "level": name, "log_error": type(error).__name__})


def _weakly_referenced(made: Made) -> Made:
    """Makes mypyc leave a class to Python: a native object frees the weak references to it, which belong to others."""
    return made


@_weakly_referenced  # by structlog, which has a lock for each stream
class QueuedText(io.TextIOBase):
    """A text stream whose writes are queued."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._writer.write(text.encode("utf-8", "backslashreplace"))
        return len(text)


_HASH_BYTES = 8


class PrefixHashes:
    """Hashes with one salt, whose secret is needed to check whether a guessed prompt was logged."""

    def __init__(self, secret: bytes) -> None:
        key = sha256(b"access log\0" + secret).digest()  # the same secret makes other salts too
        self._salted = blake2b(key=key, digest_size=_HASH_BYTES)

    def of(self, demand: Demand) -> dict[str, Any]:
        """The prompt's size in bytes, where its blocks end, and the hash of all that is before each end."""
        return {"bytes": demand.prompt_size, "ends": demand.edges, "hashes": [self._hash(key) for key in demand.keys]}

    def _hash(self, key: int) -> str:
        hashed = self._salted.copy()  # half the cost of salting it again
        hashed.update(key.to_bytes(8, "little"))
        return hashed.hexdigest()


_OFFSET_SECONDS = 1.0  # how long an offset between the clocks is used


class AccessLog(LineWriter):
    """Lines of requests, inside its `with` block. Lines that cannot be written are dropped and counted."""

    def __init__(self, out: BinaryIO, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        super().__init__(out, "access-log")
        self._is_enabled = True
        self._prefixes: PrefixHashes | None = None
        self._clock = clock
        self._wall_clock = wall_clock
        self._look_at_clocks()

    def follow(self, prefixes: PrefixHashes | None, *, enabled: bool) -> None:
        """Take over whether there are lines, and whether they have hashes of prompts."""
        self._is_enabled, self._prefixes = enabled, prefixes

    def add(self, records: list[Record]) -> None:
        if not self._is_enabled:
            return
        if records[-1].ended_seconds - self._looked_seconds > _OFFSET_SECONDS:
            self._look_at_clocks()
        offset_seconds, prefixes = self._offset_seconds, self._prefixes
        self.write(b"".join([line_of(record, offset_seconds, prefixes) for record in records]), len(records))

    def _look_at_clocks(self) -> None:
        self._looked_seconds = self._clock()
        self._offset_seconds = self._wall_clock() - self._looked_seconds  # from the loop's clock to Unix time


_LINE = (
    b'{"time":%b,"request_id":%b,"endpoint":%b,"model":%b,"client":%b,"backend":%b,"outcome":%b,"status":%b,'
    b'"stream":%b,"attempts":%b,"queue_ms":%b,"first_byte_ms":%b,"duration_ms":%b,"request_bytes":%b,'
    b'"prompt_tokens":%b,"completion_tokens":%b,"predicted_hit_tokens":%b,"actual_hit_tokens":%b,'
    b'"reused_inputs":%b,"error":%b'
)
_PLAIN_LINE: Final = _LINE + b"}\n"
_NAMES: Final = b',"alias":%b,"fell_back_from":%b'
_PREFIX: Final = b',"prefix":%b'


def line_of(record: Record, offset_seconds: float, prefixes: PrefixHashes | None = None) -> bytes:
    """The line: Unix time, and times in milliseconds since arrival; null where a thing did not happen.

    Times are cut at a thousandth by `int`, which costs an eighth of `round`.
    """
    arrived, first, ended = record.arrived_seconds, record.first_byte_seconds, record.ended_seconds
    values: list[Any] = [
        int((offset_seconds + ended) * 1e3) / 1e3,
        record.request_id,
        record.endpoint,
        record.model,
        record.client or None,
        record.backend or None,
        record.outcome,
        record.status,
        record.streams,
        record.attempts,
        int(record.queue_seconds * 1e6) / 1e3,
        None if first is None else int((first - arrived) * 1e6) / 1e3,
        int((ended - arrived) * 1e6) / 1e3,
        record.request_bytes,
        record.prompt_tokens,
        record.completion_tokens,
        record.predicted_hit_tokens,
        record.actual_hit_tokens,
        record.reused_inputs,
        record.error or None,
    ]
    is_renamed = record.alias or record.fell_back_from
    if prefixes is None and not is_renamed:
        return json_line(_PLAIN_LINE, values) or json_line_in_python(_PLAIN_LINE, values)
    template = _LINE
    if is_renamed:
        template += _NAMES
        values += (record.alias or None, record.fell_back_from or None)
    if prefixes is not None:
        template += _PREFIX
        demand = record.demand
        values.append(prefixes.of(demand) if demand is not None and demand.keys else None)
    return json_line_in_python(template + b"}\n", values)
