"""The standard streams of a process, for its logs; workers share their parent's."""

import io
import os
import select
import stat
from typing import Any, BinaryIO, TextIO, cast


def unbuffered(stream: TextIO | None) -> BinaryIO:
    """The file of a standard stream; None = closed by the parent process."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    return open(stream.fileno(), "wb", buffering=0, closefd=False)


def shared(out: BinaryIO) -> BinaryIO:
    """The same stream for a process that shares it with others."""
    return cast(BinaryIO, SharedStream(out))


class SharedStream(io.RawIOBase):
    """A stream to which other processes write at the same time. Lines stay whole in a pipe as well: the kernel keeps
    one write together, up to `PIPE_BUF` bytes; a longer line may be mixed with others."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._is_pipe = stat.S_ISFIFO(os.fstat(out.fileno()).st_mode)

    def isatty(self) -> bool:
        return self._out.isatty()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int | None:
        """Write whole lines from the start of the data; returns of how many bytes."""
        if self._is_pipe and len(data) > select.PIPE_BUF:
            lines = bytes(data[: select.PIPE_BUF]).rfind(b"\n") + 1
            data = data[: lines or len(data)]
        return self._out.write(data)
