"""What a line's sink keeps of an answer: whole bodies, and streams with or without the framing of their chunks."""

import asyncio
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat

import orjson
import pytest

from gateway.core.errors import GatewayError, MemoryFull, WrongAnswer
from gateway.core.resources import Holding, MemoryBudget
from gateway.features.batches.partial import _MOST_EVENT_BYTES, PartialAnswer, StreamUnusable
from gateway.features.batches.sink import LineSink

EVENT_STREAM = b"text/event-stream"
TOKENS = 2000


def event(text: str, ids: list[int], reason: str | None = None, prompt: list[int] | None = None) -> bytes:
    """An event of a chat's stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, "token_ids": ids or None}
    return b"data: %b\n\n" % orjson.dumps({"id": "x", "choices": [choice], "prompt_token_ids": prompt})


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream_of(tokens: int) -> list[bytes]:
    usage = {"prompt_tokens": 2, "completion_tokens": tokens}
    middle = [event(f"{number} ", [number]) for number in range(tokens - 1)]
    end = event("end", [7], "stop") + b"data: %b\n\n" % orjson.dumps({"choices": [], "usage": usage})
    return [event("", [], prompt=[1, 2]), *middle, end + b"data: [DONE]\n\n"]


def sink_of_stream(budget: MemoryBudget) -> LineSink:
    """A sink that expects a chat's stream, and has its head."""
    sink = LineSink(Holding(budget))
    sink.expect_stream(PartialAnswer("m", is_chat=True))
    sink.begin(200, EVENT_STREAM, b"")
    return sink


@pytest.mark.parametrize("frames", ["none", "middle", "every other one"])
def test_a_stream_is_put_together_whether_its_chunks_have_their_framing_or_not(frames: str) -> None:
    budget = MemoryBudget(1 << 30)
    sink, events = sink_of_stream(budget), stream_of(TOKENS)
    for number, data in enumerate(events):
        has_frame = 0 < number < TOKENS and (frames == "middle" or (frames != "none" and number % 2 == 0))
        assert not sink.write(framed(data) if has_frame else data, has_frame)
    choice = orjson.loads(sink.whole())["choices"][0]
    assert choice["message"]["content"] == "".join(f"{number} " for number in range(TOKENS - 1)) + "end"
    assert 4 * TOKENS < budget.used_bytes < len(b"".join(events)) / 4  # its events are not kept


def test_events_of_several_lines_are_kept_with_their_framing() -> None:
    sink = sink_of_stream(MemoryBudget(1 << 30))
    first, *middle, end = stream_of(9)
    sink.write(first)
    sink.write(b"".join(framed(b"event: more\r\n" + data) for data in middle), True)
    sink.write(end)
    assert orjson.loads(sink.whole())["choices"][0]["message"]["content"] == "0 1 2 3 4 5 6 7 end"


def test_a_stream_that_is_cut_has_the_tokens_that_came() -> None:
    sink = sink_of_stream(MemoryBudget(1 << 30))
    first, *middle, _ = stream_of(9)
    sink.write(first)
    sink.write(b"".join(map(framed, middle)), True)
    partial = sink.cut()
    assert partial is not None
    assert partial.replay() == [1, 2, *range(8)]


def test_an_answer_that_is_no_stream_is_kept_as_it_comes() -> None:
    budget = MemoryBudget(1 << 30)
    sink = LineSink(Holding(budget))
    sink.expect_stream(PartialAnswer("m", is_chat=True))
    sink.send(400, b"application/json", b"", b'{"error":{}}')
    assert (sink.status, sink.whole(), sink.cut()) == (400, b'{"error":{}}', None)


async def test_an_answer_that_exceeds_the_memory_ends_the_request() -> None:
    sink, written_bytes = sink_of_stream(MemoryBudget(20000)), 0
    with suppress(TimeoutError):
        async with sink.fetching:
            while not sink.write(data := framed(event("a", [97])), True):
                written_bytes += len(data)
            await asyncio.Event().wait()
    assert sink.fetching.expired()
    assert isinstance(sink.error, MemoryFull)
    assert 0 < written_bytes < 20000


def endless_event() -> Iterator[bytes]:
    """The beginning of a stream with an event that does not end, in as large pieces as a connection reads."""
    yield b"data: "
    yield from repeat(b"x" * 65536)


def endless_body() -> Iterator[bytes]:
    """The beginning of an answer that is no stream and does not end."""
    yield from repeat(b"x" * 65536)


@pytest.mark.parametrize(
    ("pieces", "limit_bytes", "budget_bytes", "error"),
    [
        (endless_event, "_MOST_EVENT_BYTES", 1 << 30, StreamUnusable),
        (endless_body, "_MOST_ANSWER_BYTES", 1 << 30, WrongAnswer),
        (endless_event, None, 500_000, MemoryFull),
        (endless_body, None, 500_000, MemoryFull),
    ],
)
async def test_at_its_bound_a_sink_drops_all_and_gives_the_memory_back(
    monkeypatch: pytest.MonkeyPatch,
    pieces: Callable[[], Iterator[bytes]],
    limit_bytes: str | None,
    budget_bytes: int,
    error: type[GatewayError],
) -> None:
    monkeypatch.setattr("gateway.features.batches.sink._MOST_ANSWER_BYTES", 4 << 20)
    budget, taken_bytes = MemoryBudget(budget_bytes), 0
    sink = LineSink(Holding(budget))
    if pieces is endless_event:
        sink.expect_stream(PartialAnswer("m", is_chat=True))
        sink.begin(200, EVENT_STREAM, b"")
    else:
        sink.begin(200, b"application/json", b"")
    with suppress(TimeoutError):
        async with sink.fetching:
            for piece in pieces():
                taken_bytes += len(piece)
                if sink.write(piece):
                    break
            await asyncio.Event().wait()
    most_bytes = {"_MOST_EVENT_BYTES": _MOST_EVENT_BYTES, "_MOST_ANSWER_BYTES": 4 << 20, None: budget_bytes}[
        limit_bytes
    ]
    assert most_bytes / 2 < taken_bytes <= most_bytes + 2 * 65536
    assert type(sink.error) is error
    assert budget.used_bytes == 0
    assert sink.write(b"more")
    assert (budget.used_bytes, sink.whole()) == (0, b"")


def test_short_pieces_take_the_memory_of_their_bytes() -> None:
    budget = MemoryBudget(1 << 30)
    sink = LineSink(Holding(budget))
    sink.begin(200, b"application/json", b"")
    tracemalloc.start()
    try:
        for _ in range(200_000):
            assert not sink.write(bytes((1, 2, 3)))
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes < 1.3 * 600_000
    assert budget.used_bytes >= 600_000
