"""Lines of several processes in one pipe."""

import os
import select
from pathlib import Path

from gateway.features.workers.streams import shared


def test_whole_lines_are_written_to_a_pipe_as_far_as_the_kernel_keeps_them_together() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as source, open(writing, "wb", buffering=0) as out:
        stream = shared(out)
        lines = b"".join(b"%04d\n" % number for number in range(2000))
        done = 0
        while done < len(lines):
            written = stream.write(memoryview(lines)[done:])
            piece = source.read(1 << 16)
            assert len(piece) == written <= select.PIPE_BUF
            assert piece.endswith(b"\n")
            done += written
        long = b"x" * 5000 + b"\n"
        assert stream.write(long + b"y\n") == len(long) + 2


def test_a_file_is_written_at_once(tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab", buffering=0) as out:
        assert shared(out).write(b"a\n" * 5000) == 10000
        assert not shared(out).isatty()
