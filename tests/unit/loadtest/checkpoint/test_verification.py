"""Gateways that change what engines say are found out, over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.access import Access
from loadtest.checkpoint.document import Finding, GreedyAnswer, ModelCard, Role, ServerInfo, Status
from loadtest.checkpoint.questions import Question, open_asker
from loadtest.checkpoint.verification import questions_of, verify_live
from loadtest.workloads.prompts import Endpoint
from tests.unit.loadtest.checkpoint.made import plan

Change = Callable[[str, Any], Any]
_DONE = b"data: [DONE]\n\n"
CHAT, EMBED = "chat", "embed"


def _unchanged(_: str, value: Any) -> Any:
    return value


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


class Fake:
    """Answers every model's questions alike; `change` alters the text, usage, stream end, vectors or health."""

    def __init__(self, change: Change = _unchanged, backend: str | None = None) -> None:
        self._change = change
        self._headers = {} if backend is None else {"x-gateway-backend": backend}

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] == EMBED:
            return web.json_response({"error": "no"}, status=404)
        text = self._change("text", "one two three")
        usage = {"prompt_tokens": 7, "completion_tokens": self._change("tokens", 3)}
        if not body["stream"]:
            return web.json_response(
                {"choices": [{"message": {"content": text}}], "usage": usage}, headers=self._headers
            )
        said = {"choices": [{"delta": {"content": self._change("stream", text)}}]}
        stream = _event(said) + _event({"choices": [], "usage": usage}) + self._change("end", _DONE)
        return web.Response(body=stream, content_type="text/event-stream", headers=self._headers)

    async def embed(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != EMBED:
            return web.json_response({"error": "not an embedding model"}, status=400)
        vectors = self._change("vectors", [[1.0, 0.5], [0.0, 1.0]])
        data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        return web.json_response({"data": data, "usage": {"prompt_tokens": self._change("prompt", 9)}})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=self._change("health", 200))

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/v1/embeddings", self.embed)
        app.router.add_get("/health", self.health)
        return app


def _server(name: str, url: str, role: Role) -> ServerInfo:
    cards = [ModelCard(id=CHAT), ModelCard(id=EMBED)]
    return ServerInfo(name=name, url=url, role=role, driven=role is Role.GATEWAY, named=True, models=cards)


@asynccontextmanager
async def _pair(change: Change, engines: int = 1) -> AsyncIterator[list[ServerInfo]]:
    async with TestServer(Fake(change, "a").app()) as front, TestServer(Fake().app()) as engine:
        urls = [str(server.make_url("")).rstrip("/") for server in (front, engine)]
        servers = [_server("gateway", urls[0], Role.GATEWAY), _server("a", urls[1], Role.ENGINE)]
        yield servers[: 1 + engines]


async def _verify(servers: list[ServerInfo]) -> tuple[dict[str, Finding], list[GreedyAnswer]]:
    async with open_asker(Access()) as session:
        checks, answers = await verify_live(session, servers, [Question(CHAT, Endpoint.CHAT, {})], [])
    return {check.name: check for check in checks}, answers


def _changing(what: str, value: Any) -> Change:
    return lambda name, unchanged: value if name == what else unchanged


async def test_a_gateway_that_changes_nothing_passes_every_check() -> None:
    async with _pair(_unchanged) as servers:
        checks, answers = await _verify(servers)
    assert {check.status for check in checks.values()} == {Status.OK}
    assert checks.keys() == {
        "health of gateway",
        "health of a",
        "greedy answer of chat",
        "usage of the greedy answer of chat",
        "end of streams of chat",
        "embeddings of embed",
    }
    assert [(answer.server, answer.text) for answer in answers] == [
        ("gateway", "one two three"),
        ("a", "one two three"),
    ]


@pytest.mark.parametrize(
    ("what", "value", "name", "found"),
    [
        ("text", "one two four", "greedy answer of chat", "one two four"),
        ("tokens", 4, "usage of the greedy answer of chat", "7 + 4 tokens"),
        ("end", b"", "end of streams of chat", "0 times [DONE]"),
        ("stream", "one two", "end of streams of chat", "[DONE] once, 7 + 3 tokens, 'one two'"),
        ("vectors", [[0.0, 1.0], [1.0, 0.5]], "embeddings of embed", "cosine 0.447214, 9 tokens, the engine 9"),
        ("vectors", [[1.0, 0.5]], "embeddings of embed", "cosine -1.000000, 9 tokens, the engine 9"),
        ("prompt", 8, "embeddings of embed", "cosine 1.000000, 8 tokens, the engine 9"),
        ("health", 503, "health of gateway", "503 of /health"),
    ],
)
async def test_what_a_gateway_changes_is_named(what: str, value: Any, name: str, found: str) -> None:
    async with _pair(_changing(what, value)) as servers:
        checks, _ = await _verify(servers)
    assert [check.name for check in checks.values() if check.status is Status.FAILED] == [name]
    assert checks[name].found == found


async def test_without_a_direct_url_nothing_is_passed_in_silence() -> None:
    async with _pair(_changing("text", "anything"), engines=0) as servers:
        checks, _ = await _verify(servers)
    for name in ("greedy answer of chat", "usage of the greedy answer of chat"):
        assert checks[name].status is Status.NOT_CHECKED
        assert checks[name].why.startswith("no direct URL")
    assert checks["embeddings"].status is Status.NOT_CHECKED
    assert checks["end of streams of chat"].status is Status.OK


async def test_an_engine_that_is_gone_is_reported_and_the_rest_is_not_checked() -> None:
    async with _pair(_unchanged) as servers:
        gone = servers[1].model_copy(update={"url": "http://127.0.0.1:1"})
        checks, _ = await _verify([servers[0], gone])
        found = gone.model_copy(update={"named": False})
        unnamed, _ = await _verify([servers[0], found])
    assert checks["health of a"].status is Status.FAILED
    assert unnamed["health of a"].status is Status.NOT_CHECKED
    assert checks["greedy answer of chat"].status is Status.NOT_CHECKED
    assert "127.0.0.1:1" in checks["greedy answer of chat"].why


async def test_a_gateway_is_not_blamed_for_an_engine_that_does_not_repeat_itself() -> None:
    counted = iter(range(100))

    def another(name: str, value: Any) -> Any:
        return f"{value} {next(counted)}" if name == "text" else value

    async with TestServer(Fake().app()) as front, TestServer(Fake(another).app()) as engine:
        urls = [str(server.make_url("")).rstrip("/") for server in (front, engine)]
        checks, _ = await _verify([_server("gateway", urls[0], Role.GATEWAY), _server("a", urls[1], Role.ENGINE)])
    found = checks["greedy answer of chat"]
    assert (found.status, found.why) == (Status.NOT_CHECKED, "a does not repeat its own answer")


async def test_an_engine_by_itself_repeats_its_answer() -> None:
    counted = iter(range(100))

    def another(name: str, value: Any) -> Any:
        return f"{value} {next(counted)}" if name == "text" else value

    for change, status in ((_unchanged, Status.OK), (another, Status.FAILED)):
        async with TestServer(Fake(change).app()) as server:
            alone = _server("", str(server.make_url("")).rstrip("/"), Role.ENGINE).model_copy(update={"driven": True})
            checks, _ = await _verify([alone])
        assert checks["greedy answer of chat"].status is status


@pytest.mark.parametrize("answer", [{"choices": []}, {"error": {"message": "no"}}])
async def test_no_answer_is_no_answer(answer: dict[str, Any]) -> None:
    async def broken(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    handler: Callable[[web.Request], Awaitable[web.Response]] = broken
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server:
        checks, answers = await _verify([_server("gateway", str(server.make_url("")).rstrip("/"), Role.GATEWAY)])
    assert checks["greedy answer of chat"].status is Status.FAILED
    assert checks["health of gateway"].status is Status.FAILED
    assert answers == []


def test_questions_are_those_of_the_plan_and_salted_where_the_run_was() -> None:
    [question], embedders = questions_of(plan(), lambda: "salt")
    assert (question.model, question.endpoint, question.new_salt, embedders) == ("m", Endpoint.CHAT, None, [])
    part = {"name": "e", "share": 1.0, "endpoint": "embeddings", "stream": False, "model": "e", "workload": {}}
    mixed = plan(cache_salt="x", mix=[part, part | {"name": "c", "endpoint": "chat", "model": "c"}])
    [question], embedders = questions_of(mixed, lambda: "salt")
    assert question.new_salt is not None
    assert (question.model, embedders) == ("c", ["e"])
