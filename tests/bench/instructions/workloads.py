"""What is counted: requests through the whole gateway, and decisions by themselves."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import cache
from itertools import islice
from typing import Any, Protocol

from gateway.core.scheduling.scheduler import Lease
from gateway.features.tracing.tracing import EXPORTED_AT_ONCE, Exporter
from tests.bench.bodies import SIZES, chats
from tests.bench.deciding.fleet import Busy
from tests.bench.instructions.gateway import MODEL, Client, Loop, clients, unrouted
from tests.bench.tracing import receiver

_WARM_UPS = 300
_STEP_SECONDS = 0.005
_PROMPTS_AN_ENGINE = 90
CHAT = {
    "id": "chatcmpl-5d0c8e7f4b1a4f0b",
    "object": "chat.completion",
    "created": 1764000000,
    "model": MODEL,
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello there. " * 20}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 250, "completion_tokens": 60, "total_tokens": 310},
}
EVENT = {
    "id": "chatcmpl-5d0c8e7f4b1a4f0b",
    "object": "chat.completion.chunk",
    "created": 1764000000,
    "model": MODEL,
    "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"
_VECTOR = [0.0625] * 16
_TEXT = b"A short text"


class Counter(Protocol):
    """Counts instructions under valgrind."""

    def begin(self) -> None:
        """Warm-ups are over after this and before the first `counting`."""

    def counting(self) -> AbstractContextManager[None]:
        """A block whose instructions count."""

    def end(self, name: str) -> None:
        """Write down what was counted."""


def request(path: bytes, document: object) -> bytes:
    """A POST as the OpenAI SDK sends it, with its usual headers."""
    body = json.dumps(document).encode()
    head = b"POST %b HTTP/1.1\r\nhost: gateway:8000\r\naccept: application/json\r\naccept-encoding: gzip\r\n" % path
    return head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def answer(document: object) -> list[bytes]:
    """A plain answer, as vLLM sends it."""
    body = json.dumps(document).encode()
    head = b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 08:00:00 GMT\r\nserver: uvicorn\r\n"
    return [head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body]


def stream(events: int) -> list[bytes]:
    """A streamed answer in the pieces that vLLM writes: the head, each event, the end marker with the framing's end."""
    usage = json.dumps(EVENT | {"choices": [], "usage": CHAT["usage"]}).encode()
    return [
        STREAM_HEAD,
        *[chunk(json.dumps(EVENT).encode())] * events,
        chunk(usage),
        chunk(b"[DONE]") + STREAM_END,
    ]


def chunk(data: bytes) -> bytes:
    """A chunk of one event."""
    event = b"data: %b\n\n" % data
    return b"%x\r\n%b\r\n" % (len(event), event)


def chat(
    counter: Counter,
    size: str,
    units: int,
    through: bool = True,
    sections: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Chats of one size, one after another on one connection; `through` a gateway, or without one.

    `sections`: more of the gateway's configuration.
    """
    bodies = [request(b"/v1/chat/completions", each) for each in islice(chats(SIZES[size], 1), _WARM_UPS + units)]
    answers = answer(CHAT)
    _ask(counter, bodies, units, lambda _: answers, b'"total_tokens": 310}}', through, sections)


def exported(counter: Counter, units: int) -> None:
    """Sampled 1 KB chats, made into spans and sent over HTTP, 128 at a time; another thread takes them."""
    bodies = [request(b"/v1/chat/completions", each) for each in islice(chats(SIZES["1k"], 1), units)]
    answers = answer(CHAT)

    async def ask() -> None:
        with clients(1, b'"total_tokens": 310}}', tracing=traces(1.0, url)) as (gateway, (client,)):
            await _one_after_another(client, bodies)
            gateway.core.finished.settle()
            finished = gateway.features["tracing"].tracing.take(units)
            config, version, clock = gateway.core.config.tracing, "1.0", asyncio.get_running_loop().time
            exporter = Exporter(config, version, lambda _: False, clock=clock)
            assert not exporter.export(finished[:EXPORTED_AT_ONCE])
            counter.begin()
            with counter.counting():
                for start in range(0, units, EXPORTED_AT_ONCE):
                    assert not exporter.export(finished[start : start + EXPORTED_AT_ONCE])
            exporter.close()

    with receiver() as url:
        _run(ask(), lambda _: answers)


def traces(sample_ratio: float, url: str = "http://127.0.0.1:4318") -> dict[str, Any]:
    return {"endpoint": url, "sample_ratio": sample_ratio}


def streamed(
    counter: Counter,
    events: int,
    units: int,
    through: bool = True,
    sections: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Streamed 1 KB chats of so many events."""
    documents = [each | {"stream": True} for each in islice(chats(SIZES["1k"], 2), _WARM_UPS + units)]
    bodies = [request(b"/v1/chat/completions", each) for each in documents]
    chunks = stream(events)
    _ask(counter, bodies, units, lambda _: chunks, STREAM_END, through, sections)


def embedded(counter: Counter, units: int) -> None:
    """Embeddings of one short text each, 64 clients at a time; the gateway sends them on in batches."""
    together = 64

    @cache
    def vectors(texts: int) -> list[bytes]:
        rows = [{"object": "embedding", "index": index, "embedding": _VECTOR} for index in range(texts)]
        usage = {"prompt_tokens": 8 * texts, "total_tokens": 8 * texts}
        return answer({"id": "embd-1", "object": "list", "model": MODEL, "data": rows, "usage": usage})

    async def ask() -> None:
        with clients(together, b"}}") as (gateway, connected):
            for turn in range(_WARM_UPS // together):
                await asyncio.gather(*asking(connected, turn))
            counter.begin()
            for turn in range(units // together):
                coroutines = asking(connected, _WARM_UPS + turn)
                with counter.counting():
                    await asyncio.gather(*coroutines)
            await gateway.features["embeddings"].batcher.stop()

    def asking(connected: list[Client], turn: int) -> list[Coroutine[None, None, None]]:
        texts = [f"{_TEXT.decode()} about thing number {turn * together + at}." for at in range(together)]
        bodies = [request(b"/v1/embeddings", {"model": MODEL, "input": text}) for text in texts]
        return [client.ask(body) for client, body in zip(connected, bodies, strict=True)]

    _run(ask(), lambda data: vectors(data.count(_TEXT)))


def _ask(
    counter: Counter,
    bodies: list[bytes],
    units: int,
    answered: Callable[[bytes], list[bytes]],
    end: bytes,
    through: bool,
    sections: dict[str, dict[str, Any]] | None = None,
) -> None:
    async def ask() -> None:
        with clients(1, end, **sections or {}) if through else unrouted(1, end) as (gateway, (client,)):
            settle = gateway.core.finished.settle if gateway else _nothing
            await _one_after_another(client, bodies[:-units])
            settle()
            counter.begin()
            await _one_after_another(client, bodies[:64])  # translated
            with counter.counting():
                await _one_after_another(client, bodies[-units:])
                settle()  # all records of these requests, and no others

    _run(ask(), answered)


def _nothing() -> None: ...


async def _one_after_another(client: Client, bodies: list[bytes]) -> None:
    for body in bodies:
        await client.ask(body)


def _run(work: Coroutine[None, None, None], answered: Callable[[bytes], list[bytes]]) -> None:
    with asyncio.Runner(loop_factory=lambda: Loop(answered)) as runner:
        runner.run(work)


def placed(counter: Counter, engines: int, units: int) -> None:
    """`Scheduler.place` of a request that is bound at once; on each engine some 30 are decoding."""
    busy = Busy(engines, cap=256, scan=32, prompts=min(_PROMPTS_AN_ENGINE * engines, 2000))
    busy.know_all_prompts()
    busy.load(30 * engines)
    counter.begin()
    for _ in range(units):
        busy.now += _STEP_SECONDS
        demand = busy.next_ask()
        with counter.counting():
            lease = busy.scheduler.place(demand, busy.now)
        assert isinstance(lease, Lease)
        busy.held.append(lease)
        busy.scheduler.first_token(lease, busy.now)
        busy.give_one_back()


def released(counter: Counter, waiting: int, tenants: int, units: int) -> None:
    """A release with a full line: give a slot back, and bind who waited for it."""
    busy = Busy(8, cap=32, scan=32, prompts=_PROMPTS_AN_ENGINE * 8)
    busy.know_all_prompts()
    busy.serve_tenants(tenants)
    busy.fill(waiting, turns=200)
    counter.begin()
    for _ in range(units):
        busy.now += _STEP_SECONDS
        with counter.counting():
            busy.give_one_back()
            busy.drain()
        busy.refill(waiting)
