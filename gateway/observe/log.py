"""The log of the process: JSON lines on standard error, by way of a writer that never holds up who logs."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, BinaryIO, TextIO, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

from gateway.observe.line_writer import LineWriter

_STEPS: tuple[Any, ...] = (
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
    structlog.processors.format_exc_info,
    structlog.processors.JSONRenderer(),
)


@contextmanager
def logging_to(out: BinaryIO) -> Iterator[LineWriter]:
    """Log to `out` while the block runs, and with it whatever else goes to standard error: asyncio's complaints,
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
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Queue a piece of text."""
        self._writer.write(text.encode("utf-8", "backslashreplace"))
        return len(text)
