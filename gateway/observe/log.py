"""The event log of the process on standard error, and what it shares with the access log: the thread that writes lines.

A reader that hangs or is gone never stops the event loop.
"""

import io
import json
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from datetime import UTC, datetime
from typing import Any, BinaryIO, Self, TextIO, TypeVar, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

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

    def follow(self, level: str, form: str) -> None:
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
        self.follow("info", "json")
        self._stack.enter_context(redirect_stderr(self._others))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        super().__exit__(*error)

    def write_text(self, text: str) -> None:
        """Write what is not an event: in JSON it is one line, whatever its own lines are."""
        if self._console is None:
            plain = text.rstrip("\n").encode("utf-8", "backslashreplace").decode()
            text = self.rendered(None, "warning", {"event": "output", "text": plain}) + "\n"
        self._stream.write(text)

    def rendered(self, logger: WrappedLogger, name: str, event: EventDict) -> str:
        """The line of an event. What cannot be rendered is logged without its values: logging raises nothing."""
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
