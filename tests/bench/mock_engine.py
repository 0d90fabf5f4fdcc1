"""A fast mock of a vLLM server: right answers that show which request they are for, and hostile ones by model.

| model | generate and pool requests get |
|---|---|
| `fine` | the answer at once; streams in four events, a few milliseconds apart |
| `slow` | the same after 20 ms |
| `endless` | a stream of 400 MB, as fast as it is read |
| `huge` | one JSON answer of 400 MB |
| `absurd` | as `slow`; a usage of 10^12 tokens if the field `user` is `absurd` |

A completion repeats the tag of its request (`tag-` and eight characters, anywhere in the body); vectors and scores
are functions of the texts. `python -m tests.bench.mock_engine` serves in a process of its own and prints its port.
"""

import asyncio
import re
import socket
import sys
from base64 import b64encode
from collections.abc import Callable
from struct import pack
from typing import cast
from zlib import crc32

import orjson
import uvloop

from tests.unit.embeddings.rerank_engine import answer as scores_of

MODELS = ("fine", "slow", "endless", "huge", "absurd")
TAG = re.compile(rb"tag-[0-9a-z]{8}")
HUGE_BYTES = 400_000_000
SLOW_SECONDS = 0.02
EVENT_SECONDS = 0.002
EVENTS = 4
_MODEL = re.compile(rb'"model":\s*"([a-z]+)"')
_LOOK_BYTES = 65536
_FILLER = b"x" * 1048576
_DONE = b"data: [DONE]\n\n"
_METRICS = b"""\
vllm:num_requests_running{engine="0"} %d
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:prefix_cache_queries_total{engine="0"} %d
vllm:prefix_cache_hits_total{engine="0"} 0
vllm:num_preemptions_total{engine="0"} 0
vllm:generation_tokens_total{engine="0"} %d
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="100000",num_gpu_blocks="6250"} 1.0
"""


def vector_of(text: str) -> bytes:
    """What the engine embeds a text as: four 32-bit floats."""
    number = crc32(text.encode())
    return pack("<4f", number % 997, number % 991, number % 983, len(text) % 977)


class MockEngine:
    """`async with MockEngine() as engine:` serves at `engine.url`; `flaps`: every other /health fails. As a command,
    `--everywhere` serves at all addresses of this machine."""

    def __init__(self, *, flaps: bool = False, host: str = "127.0.0.1") -> None:
        self._host = host
        self._held_port = socket.socket()  # bound while the engine is dead too: no outgoing connection gets the port
        self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held_port.bind((host, 0))
        self.port: int = self._held_port.getsockname()[1]
        self.running = self.served = self.received_bytes = 0
        self.connections: set[EngineConnection] = set()
        self._flaps = flaps
        self._healthy = True
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_listening(self) -> bool:
        return self._server is not None

    def health(self) -> int:
        self._healthy = not self._flaps or not self._healthy
        return 200 if self._healthy else 500

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: EngineConnection(self), self._host, self.port, backlog=1024, reuse_port=True
        )

    async def die(self) -> None:
        """Refuse connections and cut those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        # Again and again: a connection that was accepted before may be made only now.
        while self.connections:
            for connection in list(self.connections):
                connection.transport.abort()
            await asyncio.sleep(0)

    async def __aenter__(self) -> "MockEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        self._held_port.close()


class EngineConnection(asyncio.Protocol):
    """Reads requests with either framing, answers one at a time."""

    def __init__(self, engine: MockEngine) -> None:
        self.transport = cast(asyncio.Transport, None)
        self._engine = engine
        self._buffer = bytearray()
        self._target = b""
        self._later: asyncio.TimerHandle | None = None
        self._answering = False
        self._left_bytes = 0  # of an endless answer
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._engine.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """The client left; its request is aborted."""
        self._engine.connections.discard(self)
        self._left_bytes = 0
        if self._later is not None:
            self._later.cancel()
        self._ended()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._engine.received_bytes += len(data)
        while not self._answering and (body := self._take()) is not None:
            self._answer(body)

    def _take(self) -> bytes | None:
        """The body of the next request once it is complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._buffer[:end]).lower()
        start = end + 4
        self._target = head.split(b" ", 2)[1].partition(b"?")[0]
        if b"\r\ntransfer-encoding: chunked" in head:
            return self._take_chunks(start)
        at = head.find(b"\r\ncontent-length: ")
        stop = start + (int(head[at + 18 :].split(b"\r\n", 1)[0]) if at >= 0 else 0)
        if len(self._buffer) < stop:
            return None
        body = bytes(self._buffer[start:stop])
        del self._buffer[:stop]
        return body

    def _take_chunks(self, at: int) -> bytes | None:
        pieces: list[bytes] = []
        while (line := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(bytes(self._buffer[at:line]), 16)
            at = line + 2 + size + 2
            if len(self._buffer) < at:
                return None
            if not size:
                del self._buffer[:at]
                return b"".join(pieces)
            pieces.append(bytes(self._buffer[line + 2 : at - 2]))
        return None

    def _answer(self, body: bytes) -> None:
        engine, target = self._engine, self._target
        if target == b"/health":
            self._send(b"", status=engine.health())
        elif target == b"/v1/models":
            cards = [{"id": model, "object": "model", "max_model_len": 32768} for model in MODELS]
            self._send(orjson.dumps({"object": "list", "data": cards}))
        elif target == b"/metrics":
            self._send(_METRICS % (engine.running, engine.served, engine.served), b"text/plain")
        elif target == b"/received":
            self._send(b"%d" % engine.received_bytes)
        elif target.endswith((b"/completions", b"/embeddings", b"rerank", b"score", b"/responses", b"/messages")):
            self._begin(body)
        elif target.startswith(b"/v1/audio/"):
            self._begin(b'"model":"fine"' + body)
        else:
            self._send(b'{"detail":"Not Found"}', status=404)

    def _begin(self, body: bytes) -> None:
        engine = self._engine
        engine.served += 1
        engine.running += 1
        self._answering = True
        found = _MODEL.search(body[-_LOOK_BYTES:]) or _MODEL.search(body[:_LOOK_BYTES])
        model = found[1] if found else b"fine"
        if model in (b"slow", b"absurd"):
            self._after(SLOW_SECONDS, lambda: self._infer(body, model))
        else:
            self._infer(body, model)

    def _infer(self, body: bytes, model: bytes) -> None:
        if model in (b"endless", b"huge"):
            self._open_up(model == b"endless")
            return
        if self._target.endswith(b"/embeddings"):
            self._send(_embeddings(body))
        elif self._target.endswith((b"rerank", b"score")):
            status, answer = scores_of(orjson.loads(body), "mock", "cross")
            self._send(answer, status=status)
        else:
            found = TAG.search(body)
            tag = found[0] if found else b"no tag"
            if b'"stream":true' in body:
                self._stream(tag)
                return
            tokens = 10**12 if model == b"absurd" and b'"user":"absurd"' in body else 5
            self._send(_completion(tag, tokens))
        self._ended()

    def _stream(self, tag: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(head + _chunk(_event(tag)))
        self._after(EVENT_SECONDS, lambda: self._next_event(tag, 1))

    def _next_event(self, tag: bytes, number: int) -> None:
        if number < EVENTS:
            self.transport.write(_chunk(_event(tag)))
            self._after(EVENT_SECONDS, lambda: self._next_event(tag, number + 1))
            return
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d,"total_tokens":9}}\n\n' % EVENTS
        self.transport.write(_chunk(usage) + _chunk(_DONE) + b"0\r\n\r\n")
        self._ended()
        self.data_received(b"")

    def _open_up(self, streams: bool) -> None:
        """Begin an answer of hundreds of megabytes, written as fast as the gateway reads."""
        kind = b"text/event-stream" if streams else b"application/json"
        start = b"data: {}\n\n" if streams else b'{"object":"list","data":"'
        self._left_bytes = HUGE_BYTES
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (kind, HUGE_BYTES + len(start)) + start)
        self.resume_writing()

    def pause_writing(self) -> None:
        """The gateway reads no more for now."""
        self._paused = True

    def resume_writing(self) -> None:
        """The gateway has read enough for more of an endless answer."""
        self._paused = False
        while self._left_bytes > 0 and not self._paused and not self.transport.is_closing():
            piece = _FILLER[: min(len(_FILLER), self._left_bytes)]
            self._left_bytes -= len(piece)
            if not self._left_bytes:
                piece = piece[:-2] + b'"}'
            self.transport.write(piece)

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self._later = asyncio.get_running_loop().call_later(seconds, then)

    def _ended(self) -> None:
        if self._answering:
            self._answering = False
            self._engine.running -= 1

    def _send(self, body: bytes, kind: bytes = b"application/json", *, status: int = 200) -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
        self.transport.write(head + body)


def _embeddings(body: bytes) -> bytes:
    given = orjson.loads(body)["input"]
    texts = [given] if isinstance(given, str) else given
    data = [
        {"index": index, "object": "embedding", "embedding": b64encode(vector_of(text)).decode()}
        for index, text in enumerate(map(str, texts))
    ]
    usage = {"prompt_tokens": len(data), "total_tokens": len(data)}
    return orjson.dumps({"id": "embd-1", "object": "list", "model": "fine", "data": data, "usage": usage})


def _completion(tag: bytes, tokens: int) -> bytes:
    return (
        b'{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"%b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,'
        b'"total_tokens":%d}}' % (tag, tokens, tokens, 2 * tokens)
    )


def _event(tag: bytes) -> bytes:
    return b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % tag


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(flaps: bool, host: str) -> None:
    async with MockEngine(flaps=flaps, host=host) as engine:
        print(engine.port, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve("--flaps" in sys.argv, "0.0.0.0" if "--everywhere" in sys.argv else "127.0.0.1"))
