import gc
import io
import sys
import threading
import weakref
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.observe.log import MAX_HELD_BYTES, LineWriter, QueuedText


class Sink(io.BytesIO):
    """Takes as much of each write as the test says: a number of bytes, None = not now, an error."""

    def __init__(self, *takes: int | OSError | None) -> None:
        super().__init__()
        self.takes = list(takes)

    def write(self, data: object) -> int:
        take = self.takes.pop(0) if self.takes else 1 << 30
        if isinstance(take, OSError):
            raise take
        if take is None:
            return take  # type: ignore[return-value]
        return super().write(bytes(data)[:take])  # type: ignore[call-overload]


class Stuck(io.BytesIO):
    """A reader that hangs until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def write(self, data: object) -> int:
        self.reached.set()
        assert self.let_go.wait(10)
        return super().write(bytes(data))  # type: ignore[call-overload]


def written(sink: Sink, *lines: bytes) -> LineWriter:
    with LineWriter(sink, "test") as writer:
        for line in lines:
            writer.write(line)
    return writer


def test_a_writer_that_takes_little_at_a_time_gets_every_line() -> None:
    sink = Sink(3, 1, 4)
    assert written(sink, b"one\n", b"two\n", b"three\n").dropped == 0
    assert sink.getvalue() == b"one\ntwo\nthree\n"


def test_lines_that_a_full_disk_has_no_room_for_are_counted() -> None:
    sink = Sink(5, OSError(28, "no space"))
    assert written(sink, b"one\n", b"two\n", b"three\n").dropped == 2
    assert sink.getvalue() == b"one\nt"


def batches(sink: Sink, *pairs: tuple[bytes, ...]) -> LineWriter:
    """Each tuple of lines is written by itself, as after a pause."""
    writer = LineWriter(sink, "test")
    for lines in pairs:
        for line in lines:
            writer.write(line)
        writer._write_all()
    return writer


def test_after_a_torn_line_the_next_one_begins_a_line_of_its_own() -> None:
    error = OSError(28, "no space")
    sink = Sink(5, error, error, 1 << 30)
    assert batches(sink, (b"one\n", b"two\n"), (b"lost\n",), (b"three\n",), (b"four\n",)).dropped == 2
    assert sink.getvalue() == b"one\nt\nthree\nfour\n"


LINES = [b"<a>\n", b"<bc>\n", b"<def>\n"]


@given(
    st.lists(st.lists(st.sampled_from(LINES), max_size=4).map(tuple), max_size=8),
    st.lists(st.one_of(st.integers(1, 9), st.builds(OSError, st.just(28))), max_size=20),
)
def test_each_line_is_written_whole_or_counted(lines: list[tuple[bytes, ...]], takes: list[int | OSError]) -> None:
    sink = Sink(*takes)
    writer = batches(sink, *lines)
    there = sink.getvalue().split(b"\n")
    whole = [piece for piece in there if piece + b"\n" in LINES]
    assert all(piece in whole or any(line.startswith(piece) for line in LINES) for piece in there)
    lacking_a_newline = len(there) - (not there[-1])  # a line may lack no more than that, and is counted then
    assert 0 <= len(whole) + writer.dropped - sum(map(len, lines)) <= lacking_a_newline


def test_what_is_held_for_a_reader_that_hangs_is_bounded_by_bytes() -> None:
    sink, line = Stuck(), b"x" * 99_999 + b"\n"
    with LineWriter(sink, "test") as writer:
        writer.write(b"first\n")
        assert sink.reached.wait(10)
        for _ in range(1000):
            writer.write(line)
        kept = MAX_HELD_BYTES // (len(line) + 64)
        assert writer.dropped == 1000 - kept
        sink.let_go.set()
    assert sink.getvalue().count(b"\n") == kept + 1


def test_many_threads_lose_and_mix_no_lines() -> None:
    sink = Sink()

    def write(name: int) -> Callable[[], None]:
        return lambda: [writer.write(b"%d %d\n" % (name, number)) for number in range(2000)] and None

    with LineWriter(sink, "test") as writer:
        threads = [threading.Thread(target=write(name)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = [tuple(map(int, line.split())) for line in sink.getvalue().splitlines()]
    assert sorted(lines) == [(name, number) for name in range(4) for number in range(2000)]


def test_a_pipe_that_takes_nothing_now_is_tried_again() -> None:
    sink = Sink(None, None)
    with LineWriter(sink, "test") as writer:
        writer.write(b"late\n")
        deadline = threading.Event()
        while not sink.getvalue():
            assert not deadline.wait(0.01)
    assert sink.getvalue() == b"late\n"
    assert writer.dropped == 0


def test_a_stream_that_was_weakly_referenced_leaves_the_references_whole() -> None:
    """structlog has a table of locks by stream; compiled code once freed its keys."""
    streams = [QueuedText(LineWriter(io.BytesIO(), "test")) for _ in range(50)]
    references = [weakref.ref(stream) for stream in streams]
    before = [sys.getrefcount(reference) for reference in references]
    streams.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * 50
    assert [sys.getrefcount(reference) for reference in references] == before
