"""What a scripted backend does: steps to be put together, and the bytes of answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from tests.scripted import Connection

Step = Callable[["Connection"], Awaitable[None]]

USAGE_EVENT = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}\n\n'
DONE_EVENT = b"data: [DONE]\n\n"


def raw(data: bytes) -> Step:
    """Write these bytes, together."""

    async def step(connection: "Connection") -> None:
        connection.send(data)

    return step


def drained(data: bytes, times: int = 1) -> Step:
    """Write these bytes that often, no faster than they are taken."""

    async def step(connection: "Connection") -> None:
        for _ in range(times):
            connection.send(data)
            while connection.transport.get_write_buffer_size() > 262144:
                await asyncio.sleep(0.002)
            if connection.transport.is_closing():
                await connection.closed.wait()  # which ends the script, before it counts as played

    return step


def pause(seconds: float) -> Step:
    """Do nothing for a while."""

    async def step(connection: "Connection") -> None:
        await asyncio.sleep(seconds)

    return step


def until(event: asyncio.Event) -> Step:
    """Wait for the test."""

    async def step(connection: "Connection") -> None:
        await event.wait()

    return step


def one_of(allowed: asyncio.Semaphore) -> Step:
    """Wait until the test allows one answer more."""

    async def step(connection: "Connection") -> None:
        await allowed.acquire()

    return step


def allow(allowed: asyncio.Semaphore, count: int) -> None:
    """Let a backend that plays `one_of` give so many answers more."""
    for _ in range(count):
        allowed.release()


def hang() -> Step:
    """Wait until the gateway closes the connection."""

    async def step(connection: "Connection") -> None:
        await connection.closed.wait()

    return step


def deaf() -> Step:
    """Take nothing more from the socket."""

    async def step(connection: "Connection") -> None:
        connection.transport.pause_reading()

    return step


def fin() -> Step:
    """Close the connection."""

    async def step(connection: "Connection") -> None:
        connection.mark_played()
        connection.transport.close()
        await connection.closed.wait()

    return step


def reset() -> Step:
    """Reset the connection."""

    async def step(connection: "Connection") -> None:
        connection.mark_played()
        connection.reset()
        await connection.closed.wait()

    return step


def after(seconds: float, then: Step) -> Step:
    """Take another step later, on the connection that is idle by then, while the script goes on and ends."""

    async def step(connection: "Connection") -> None:
        connection.later(seconds, then)

    return step


def head(status: int, *headers: bytes, kind: bytes = b"text/event-stream", chunked: bool = True) -> Step:
    """The head of an answer."""
    framing = (b"transfer-encoding: chunked",) if chunked else ()
    lines = (b"HTTP/1.1 %d X" % status, b"content-type: " + kind, *framing, *headers)
    return raw(b"\r\n".join(lines) + b"\r\n\r\n")


def chunk(data: bytes) -> Step:
    """One chunk."""
    return raw(b"%x\r\n%b\r\n" % (len(data), data))


def last_chunk() -> Step:
    """The end of a chunked body."""
    return raw(b"0\r\n\r\n")


def whole(status: int, body: bytes, *headers: bytes, kind: bytes = b"application/json") -> bytes:
    """A whole answer."""
    lines = (b"HTTP/1.1 %d X" % status, b"content-type: " + kind, b"content-length: %d" % len(body), *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def answer(status: int, document: Any, *headers: bytes) -> tuple[Step, ...]:
    """A whole JSON answer."""
    return (raw(whole(status, orjson.dumps(document), *headers)),)


def json_answer(text: str = "ok") -> tuple[Step, ...]:
    """A plain chat completion."""
    return answer(200, completion(text))


def completion(text: str) -> dict[str, Any]:
    """A chat completion's document."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage}


def echo() -> tuple[Step, ...]:
    """Answer with what was asked: the last message's content."""

    async def step(connection: "Connection") -> None:
        assert connection.seen is not None
        text = orjson.loads(connection.seen.body)["messages"][-1]["content"]
        connection.send(whole(200, orjson.dumps(completion(text))))

    return (step,)


def event(text: str, finish: str | None = None) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: %b\n\n" % orjson.dumps({"object": "chat.completion.chunk", "choices": [choice]})


def tokens(count: int, seconds_apart: float = 0.0) -> tuple[Step, ...]:
    """The head of a stream and this many of its events."""
    steps: list[Step] = [head(200)]
    for number in range(count):
        steps.append(chunk(event(f"t{number} ")))
        if seconds_apart:
            steps.append(pause(seconds_apart))
    return tuple(steps)


def stream(count: int = 3, seconds_apart: float = 0.0) -> tuple[Step, ...]:
    """A whole stream."""
    ending = (chunk(event("", "stop")), chunk(USAGE_EVENT), chunk(DONE_EVENT), last_chunk())
    return (*tokens(count, seconds_apart), *ending)
