"""The two logs: of events, on standard error, and of requests, one line each. Threads write their lines.

A hanging or vanished reader never stops the event loop.
"""

import io
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from typing import Any, BinaryIO, Final, Self, TextIO, TypeVar, cast

import orjson
import structlog
from structlog.typing import EventDict, WrappedLogger

from gateway._native import json_line, json_line_in_python
from gateway.core.observe.record import Record
from gateway.core.request import Demand

MAX_HELD_BYTES = 33554432
_LINE_OVERHEAD_BYTES = 64  # memory of a short line besides its text
_SLICE_BYTES = 65536
_PAUSE_SECONDS = 0.2
_EXIT_SECONDS = 2.0
Made = TypeVar("Made")


class LineWriter:
    """A bounded queue and its writer, which runs inside the `with` block. Excess lines are dropped and counted.

    `out` must be unbuffered: Python flushes a buffer at its exit, waiting for the reader.
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

    def is_for_people(self, form: str) -> bool:
        """Whether lines of this form (`auto`, `json` or `console`) are for people: `auto` is, on a terminal."""
        return form == "console" or (form == "auto" and self._out.isatty())

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


def unix_seconds() -> float:
    return datetime.now(UTC).timestamp()


def iso_time(seconds: float) -> str:
    """A Unix time in ISO 8601, in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[: -len("+00:00")] + "Z"


class EventLog(LineWriter):
    """The log of the process while its `with` block runs, and with it all other output to standard error: asyncio's
    messages, warnings, tracebacks of threads.
    """

    def __init__(
        self, out: BinaryIO, wall_clock: Callable[[], float] = unix_seconds, worker: int | None = None
    ) -> None:
        """`worker`: the number that is in every line; None = this process is alone, or the parent of workers."""
        super().__init__(out, "log")
        self._wall_clock = wall_clock
        self._own: dict[str, Any] = {} if worker is None else {"worker": worker}
        self._stream, self._others = QueuedText(self), TextOfOthers(self)
        self._console: Any = None  # the renderer for people; None = JSON
        self._stack = ExitStack()

    def apply(self, level: str, form: str) -> None:
        """Take over the lowest level that is logged, and the form of lines: `auto`, `json` or `console`."""
        self._console = None
        if self.is_for_people(form):
            colors = self._out.isatty() and not os.environ.get("NO_COLOR")
            # Not with the values of variables, as Rich shows them: they may be secrets or prompts.
            plain = structlog.dev.plain_traceback
            self._console = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
        structlog.configure(
            processors=[self.rendered],
            wrapper_class=structlog.make_filtering_bound_logger(level),
            logger_factory=structlog.WriteLoggerFactory(cast(TextIO, self._stream)),
        )

    def __enter__(self) -> Self:
        super().__enter__()
        self.apply("info", "json")
        self._stack.enter_context(redirect_stderr(self._others))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        super().__exit__(*error)

    def write_text(self, text: str) -> None:
        """Write text that is not an event; in JSON it becomes one line."""
        if self._console is None:
            plain = text.rstrip("\n").encode("utf-8", "backslashreplace").decode()
            text = self.rendered(None, "warning", {"event": "output", "text": plain}) + "\n"
        self._stream.write(text)

    def rendered(self, logger: WrappedLogger, name: str, event: EventDict) -> str:
        """The line of an event. If it cannot be rendered, it is logged without its values: logging raises nothing."""
        words = str(event.get("event"))
        try:
            stamped: Any = {"timestamp": iso_time(self._wall_clock()), "level": "", "event": "", **self._own, **event}
            stamped = structlog.processors.add_log_level(logger, name, stamped)
            if self._console is None:
                stamped = structlog.processors.format_exc_info(logger, name, stamped)
                return str(structlog.processors.JSONRenderer()(logger, name, stamped))
            return str(self._console(logger, name, stamped))
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


@_weakly_referenced
class TextOfOthers(QueuedText):
    """Standard error for all that does not log events: libraries, warnings, tracebacks of threads."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(log)
        self._log = log
        self._begun = ""  # a line without its end

    def write(self, text: str) -> int:
        lines, end, rest = (self._begun + text).rpartition("\n")
        self._begun = rest[-_SLICE_BYTES:]
        if lines.strip():
            self._log.write_text(lines + end)
        return len(text)


_HASH_BYTES = 8


class PrefixHashes:
    """Hashes with a secret salt, which is needed to check whether a guessed prompt was logged."""

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


_MOST_AGENT_BYTES = 128
_TRACE: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def _trace_id(traceparent: bytes) -> str | None:
    """The trace id of a W3C `traceparent`; None = there is none, or it is invalid."""
    found = _TRACE.search(traceparent)
    return found[1].decode() if found is not None else None


_FIELDS: Final[dict[str, Callable[[Record], object]]] = {
    "tenant": lambda record: record.tenant or None,
    "class": lambda record: "batch" if record.batch else "interactive",
    "address": lambda record: record.address or None,
    "user_agent": lambda record: record.user_agent[:_MOST_AGENT_BYTES].decode("latin-1") or None,
    "trace_id": lambda record: _trace_id(record.traceparent),
    "response_bytes": lambda record: record.response_bytes,
}


_LINE: Final = (
    b'{"time":%b,"request_id":%b,"endpoint":%b,"model":%b,"client":%b,"backend":%b,"outcome":%b,"status":%b,'
    b'"stream":%b,"attempts":%b,"queue_ms":%b,"first_byte_ms":%b,"duration_ms":%b,"request_bytes":%b,'
    b'"prompt_tokens":%b,"completion_tokens":%b,"predicted_hit_tokens":%b,"actual_hit_tokens":%b,'
    b'"error":%b'
)


def _template(more: Sequence[str]) -> bytes:
    return _LINE + b"".join([b',"%b":%%b' % name.encode() for name in more]) + b"}\n"


class LineForm:
    """Additional fields of lines: `fields` of `server.access_log_fields`, and hashes of prompts."""

    def __init__(self, fields: Sequence[str] = (), prefixes: PrefixHashes | None = None) -> None:
        self._more: list[Callable[[Record], object]] = [_FIELDS[name] for name in fields]
        self._prefixes = prefixes
        last = ["prefix"] if prefixes is not None else []
        self._template = _template([*fields, *last])
        self._template_of_renamed = _template([*fields, "alias", "fell_back_from", *last])

    def line(self, record: Record, ended: str | float) -> bytes:
        """When the request ended, and times in milliseconds since arrival; null where a thing did not happen.

        Times are cut at a thousandth by `int`, which costs an eighth of `round`.
        """
        arrived, first = record.arrived_seconds, record.first_byte_seconds
        values: list[Any] = [
            ended,
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
            int((record.ended_seconds - arrived) * 1e6) / 1e3,
            record.request_bytes,
            record.prompt_tokens,
            record.completion_tokens,
            record.predicted_hit_tokens,
            record.actual_hit_tokens,
            record.error or None,
        ]
        if self._more:
            values += [read(record) for read in self._more]
        template = self._template
        if record.alias or record.fell_back_from:
            template = self._template_of_renamed
            values += (record.alias or None, record.fell_back_from or None)
        if self._prefixes is None:
            return json_line(template, values) or json_line_in_python(template, values)
        demand = record.demand
        values.append(self._prefixes.of(demand) if demand is not None and demand.keys else None)
        return json_line_in_python(template, values)


_OFFSET_SECONDS = 1.0  # how long an offset between the clocks is used


class AccessLog(LineWriter):
    """Lines of requests, inside its `with` block. Lines that cannot be written are dropped and counted."""

    def __init__(self, out: BinaryIO, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        super().__init__(out, "access-log")
        self._is_enabled = True
        self._is_console = False
        self._form = LineForm()
        self._second = -1  # of the text, up to which times of one second are the same
        self._second_text = ""
        self._thousandths = [f".{number:03d}Z" for number in range(1000)]
        self._clock = clock
        self._wall_clock = wall_clock
        self._look_at_clocks()

    def apply(self, form: LineForm, *, enabled: bool, style: str) -> None:
        """Take over the settings: lines on or off, their fields, and their style: `auto`, `json` or `console`."""
        self._is_enabled, self._form = enabled, form
        self._is_console = self.is_for_people(style)

    def add(self, records: list[Record]) -> None:
        if not self._is_enabled:
            return
        if records[-1].ended_seconds - self._looked_seconds > _OFFSET_SECONDS:
            self._look_at_clocks()
        line_of = console_line_of if self._is_console else self._form.line
        self.write(b"".join(map(line_of, records, self._ended(records))), len(records))

    def _ended(self, records: list[Record]) -> list[str]:
        """When they ended, as `iso_time` has it. The text of a second is made once: most lines are of the same one."""
        times, offset_seconds, ends = [], self._offset_seconds, self._thousandths
        second, text = self._second, self._second_text
        for record in records:
            thousandths = int((offset_seconds + record.ended_seconds) * 1e3)
            if thousandths // 1000 != second:
                second = thousandths // 1000
                text = iso_time(float(second))[: -len(".000Z")]
            times.append(text + ends[thousandths - second * 1000])
        self._second, self._second_text = second, text
        return times

    def _look_at_clocks(self) -> None:
        self._looked_seconds = self._clock()
        self._offset_seconds = self._wall_clock() - self._looked_seconds  # from the loop's clock to Unix time


def console_line_of(record: Record, ended: str) -> bytes:
    """The same for people, shorter. Clients' text is quoted: it may have control characters."""
    arrived, first = record.arrived_seconds, record.first_byte_seconds
    parts = [ended, f"{record.status or '---'} {record.outcome:<10} {record.endpoint}"]
    parts += [_quoted(record.model)] if record.model else []
    for name, value in (("client", record.client), ("backend", record.backend)):
        parts += [f"{name}={_quoted(value)}"] if value else []
    for name, seconds in (
        ("queue", record.queue_seconds),
        ("first_byte", None if first is None else first - arrived),
        ("duration", record.ended_seconds - arrived),
    ):
        parts += [] if seconds is None else [f"{name}={seconds * 1e3:.0f}ms"]
    if record.prompt_tokens:
        hit = "" if record.actual_hit_tokens is None else f"({record.actual_hit_tokens} cached)"
        parts.append(f"tokens={record.prompt_tokens}{hit}+{record.completion_tokens}")
    parts += [f"error={json.dumps(record.error)}"] if record.error else []
    return f"{'  '.join(parts)}\n".encode()


def _quoted(text: str) -> str:
    return text if text.isascii() and text.isprintable() else json.dumps(text)


MOST_RECENT: Final = 200
_COMPLETED = "completed"


class RecentRequests:
    """Keeps the records of the last requests and of the last failed ones, oldest first; they become rows only when
    somebody watches. `offset_seconds`: from the loop's clock to Unix time."""

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
        """Records that ended after the first `count`, oldest first; older ones may be gone."""
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
