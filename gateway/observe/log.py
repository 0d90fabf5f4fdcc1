"""The log of the process: JSON lines on standard error.

A thread writes the lines, so that a reader that hangs or is gone never stops the event loop.
"""

import io
import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, BinaryIO, Self, TextIO, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

MAX_HELD_BYTES = 33554432
_LINE_OVERHEAD_BYTES = 64  # that a short line takes in memory beside its text
_SLICE_BYTES = 65536
_PAUSE_SECONDS = 0.2
_EXIT_SECONDS = 2.0


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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def write(self, line: bytes) -> None:
        """Queue a line, with its newline. Never waits for the reader, never raises."""
        size = len(line) + _LINE_OVERHEAD_BYTES
        with self._lock:
            if self._held_bytes + size > MAX_HELD_BYTES:
                self.dropped += 1
                return
            self._held_bytes += size
            self._lines.append(line)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_EXIT_SECONDS)  # a reader that hangs keeps the thread, not the process

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
        done = 0
        while done < len(data):
            try:
                written = self._out.write(memoryview(data)[done:])
            except (OSError, ValueError):  # gone, full, or closed
                break
            if written:
                done += written
            elif self._stop.wait(_PAUSE_SECONDS):  # a non-blocking pipe that is full
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


class QueuedText(io.TextIOBase):
    """A text stream whose writes are queued."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._writer.write(text.encode("utf-8", "backslashreplace"))
        return len(text)
