"""What a line's sink keeps of an answer: whole bodies, and streams with or without the framing of their chunks."""

import asyncio
from contextlib import suppress

import orjson
import pytest

from gateway.batches.partial import PartialAnswer
from gateway.batches.sink import LineSink
from gateway.errors import MemoryFull
from gateway.resources import Holding, MemoryBudget

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
