"""A tiny OpenAI-like server whose every answer is a function of the request body's `act` field."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

_DEADLINE_SECONDS = 120  # for what takes no time on an idle machine


@dataclass
class Fake:
    """What the server was asked, and where it listens."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    open_requests: int = 0
    url: str = ""
    act: str | None = None  # whatever the body says
    refuses: tuple[str, ...] = ()  # fields, if it is strict
    loses_its_metrics: bool = False  # once it was asked anything

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.open_requests += 1
        try:
            act = self.act or body.get("act", "stream" if body.get("stream") else "whole")
            return await _ACTS[act](self, request, body)
        finally:
            self.open_requests -= 1

    async def metrics(self, _request: web.Request) -> web.Response:
        if self.loses_its_metrics and self.bodies:
            return web.Response(status=503)
        return web.Response(text='# TYPE hits_total counter\nhits_total{backend="a"} 3\n')


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_tokens": 100,
        "completion_tokens": body.get("max_tokens", 0),
        "prompt_tokens_details": {"cached_tokens": 64},
    }


async def _begun(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "content-type": "text/event-stream",
            "x-gateway-backend": "gpu-a",
            "x-gateway-prefix-tokens": "48",
            "x-gateway-queue-ms": "2.5",
        }
    )
    await response.prepare(request)
    return response


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _stream(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await _begun(request)
    await response.write(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}))
    for _ in range(body["max_tokens"]):
        await response.write(_event({"choices": [{"delta": {"content": "word "}}], "usage": None}))
    await response.write(_event({"choices": [], "usage": _usage(body)}) + b"data: [DONE]\n\n")
    return response


async def _whole(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = (
        {"data": [{"embedding": [0.0]}]}
        if "input" in body
        else {"choices": [{"text": "word " * body.get("max_tokens", 0)}]}
    )
    return web.json_response(answer | {"usage": _usage(body)})


async def _refused(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "queue full"}}, status=429, headers={"retry-after": "1"})


async def _refused_otherwise(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=502, text="<h1>Bad Gateway</h1>")


async def _strict(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    unknown = [name for name in ("ignore_eos", "min_tokens", "cache_salt") if name in body and name in fake.refuses]
    if unknown:
        message = f"Unrecognized request arguments supplied: {', '.join(unknown)}"
        return web.json_response({"error": {"message": message}}, status=400)
    return await (_stream if body.get("stream") else _whole)(fake, request, body)


async def _held(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await fake.release.wait()
    return await _stream(fake, request, body)


_ACTS: dict[str, Callable[[Fake, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]] = {
    "stream": _stream,
    "whole": _whole,
    "refused": _refused,
    "strict": _strict,
    "refused_otherwise": _refused_otherwise,
    "held": _held,
}


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})


async def _tokenize(request: web.Request) -> web.Response:
    return web.json_response({"count": len((await request.json())["prompt"]) // 5})


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[Fake]:
    state = Fake()
    app = web.Application()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        app.router.add_post(path, state.answer)
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/tokenize", _tokenize)
    app.router.add_get("/metrics", state.metrics)
    async with TestServer(app) as server:
        state.url = str(server.make_url("")).rstrip("/")
        yield state
        state.release.set()


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    """The server, listening on a free port of loopback."""
    async with _serving() as state:
        yield state


@contextlib.contextmanager
def _elsewhere() -> Iterator[Fake]:
    ready: queue.Queue[tuple[Fake, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        async with _serving() as state:
            over = asyncio.Event()
            ready.put((state, asyncio.get_running_loop(), over))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    state, loop, over = ready.get(timeout=_DEADLINE_SECONDS)
    yield state
    loop.call_soon_threadsafe(over.set)
    thread.join(timeout=_DEADLINE_SECONDS)
    assert not thread.is_alive()


@pytest.fixture
def fake_elsewhere() -> Iterator[Fake]:
    """The server in a thread of its own, for tests that block."""
    with _elsewhere() as state:
        yield state


@pytest.fixture
def another_elsewhere() -> Iterator[Fake]:
    """One more of them."""
    with _elsewhere() as state:
        yield state
