"""Usage of texts that shared a batch, where the model's tokenizer is configured: what the engine would have counted."""

import asyncio
import hashlib
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from gateway.features.exact.conversation import PromptFeature
from gateway.features.exact.tokenizer import ModelTokenizer
from tests.integration.conftest import engine_kind
from tests.integration.fleet import EMBEDDING_MODEL, MODELS, Fleet
from tests.integration.gateway_process import Gateway, running_gateway
from tests.integration.observed import eventually, read
from tests.integration.publishing import get
from tests.integration.test_embeddings import Told, check_equal, post
from tests.unit.backends.scripted import Scripted
from tests.unit.exact.models import byte_level, saved, sentence_piece

CLIENTS = 48
CONTEXT_TOKENS = 256
JUDGED_SECONDS = 120.0  # loading the library takes seconds, and longer beside engines that start


@dataclass(frozen=True)
class Engine:
    """An embeddings engine, and where its tokenizer is."""

    url: str
    tokenizer: str


class Answers:
    """What a backend with a real tokenizer answers: vectors that depend on the tokens, and their count."""

    def __init__(self, folder: str) -> None:
        self._model = ModelTokenizer(folder, 0)

    def _ids(self, given: Any, special: bool = True) -> list[list[int]]:
        texts = [given] if isinstance(given, str) else given
        documents = [{"prompt": text, "add_special_tokens": special} for text in texts]
        told = [
            self._model.tokens("completions", document, "string", [PromptFeature.COMPLETION]) for document in documents
        ]
        return [array("I", tokens).tolist() for tokens in told]

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """As /tokenize; there is no chat template."""
        document = await request.json()
        if "prompt" not in document:
            return web.json_response({"error": {"message": "no chat template"}}, status=400)
        [ids] = self._ids(document["prompt"], document.get("add_special_tokens", True))
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def embed(self, request: web.Request) -> web.StreamResponse:
        """As /v1/embeddings."""
        document = await request.json()
        lists = self._ids(document["input"])
        await asyncio.sleep(0.02)
        if max(map(len, lists)) > CONTEXT_TOKENS:
            message = f"a prompt of {max(map(len, lists))} tokens, of {len(lists)}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        data = [{"index": n, "object": "embedding", "embedding": _vector(ids)} for n, ids in enumerate(lists)]
        if document.get("encoding_format") == "base64":
            for entry in data:
                entry["embedding"] = b64encode(np.array(entry["embedding"], "<f4").tobytes()).decode()
        total = sum(map(len, lists))
        usage = {"prompt_tokens": total, "total_tokens": total}
        return web.json_response({"id": "embd-x", "object": "list", "data": data, "usage": usage})


def _vector(ids: list[int]) -> Any:
    seed = int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:4], "big")
    return np.random.default_rng(seed).normal(size=16).astype("<f4").tolist()


@pytest.fixture
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    """Real vLLM, or a backend of the test's own: simulated engines have no model's tokenizer."""
    if engine_kind(request.config) == "vllm":
        fleet: Fleet = request.getfixturevalue("fleet")
        yield Engine(fleet.embedding_url, str(MODELS / EMBEDDING_MODEL))
        return
    folder = saved(sentence_piece(), tmp_path / "pieces", None)
    async with Scripted(model=EMBEDDING_MODEL) as server:
        answers = Answers(folder)
        server.answers |= {"/tokenize": answers.tokenize, "/v1/embeddings": answers.embed}
        yield Engine(server.url, folder)


@asynccontextmanager
async def in_front_of(engine: Engine, folder: Path, tokenizer: str, state: str) -> AsyncIterator[Gateway]:
    """A gateway whose tokenizer has been compared with the engine's, with this outcome."""
    config = {"backends": [{"url": engine.url}], "models": {EMBEDDING_MODEL: {"tokenizer": tokenizer}}}
    with ExitStack() as stack:
        gateway = await asyncio.to_thread(stack.enter_context, running_gateway(folder, config))  # it asks this process

        async def judged() -> bool:
            [shown] = (await get(f"{gateway.admin_url}/admin/backends"))["backends"]
            return bool(shown["tokenizers"].get(EMBEDDING_MODEL, {}).get("state") == state)

        await eventually(judged, f"its tokens are {state}", JUDGED_SECONDS)
        yield gateway


def bodies() -> list[dict[str, Any]]:
    """One text of each client or a few, in either form."""
    texts = [
        f"Client {n} asks, in {n % 7} words" + " or more" * (n % 11) + " … žluťoučký kůň" * (n % 2)
        for n in range(CLIENTS)
    ]
    return [
        {"input": text if n % 3 else [text, text.upper(), "Again."], "encoding_format": "float" if n % 2 else "base64"}
        for n, text in enumerate(texts)
    ]


async def ask_all(session: aiohttp.ClientSession, url: str, asked: list[dict[str, Any]]) -> list[Told]:
    return list(await asyncio.gather(*(post(session, url, body) for body in asked)))


async def test_everybody_is_told_the_usage_that_the_engine_would_have_counted(engine: Engine, tmp_path: Path) -> None:
    async with (
        in_front_of(engine, tmp_path, engine.tokenizer, "verified") as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        asked = bodies()
        direct = [await post(session, engine.url, body) for body in asked]
        for _ in range(5):  # a tokenizer that gets no processor is late, and usage estimated then
            through = await ask_all(session, gateway.url, asked)
            for ours, theirs in zip(through, direct, strict=True):
                check_equal(ours, theirs)
            if all(answer[2]["x-gateway-usage"] == "exact" for answer in through):
                break
            await asyncio.sleep(2.0)
        else:
            raise AssertionError("usage was estimated in each of 5 rounds")
        assert await read(gateway.admin_url, "gateway_embedding_counted_total", result="counted") > 0
        assert await read(gateway.admin_url, "gateway_embedding_batch_items_count") < len(asked)


async def test_a_text_that_is_too_long_is_refused_in_the_words_for_it_alone(engine: Engine, tmp_path: Path) -> None:
    async with (
        in_front_of(engine, tmp_path, engine.tokenizer, "verified") as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        asked = bodies()
        asked[20] = {"input": ["A short one.", "!?" * 200]}
        direct = [await post(session, engine.url, body) for body in asked]
        through = await ask_all(session, gateway.url, asked)
        assert direct[20][0] == 400
        for ours, theirs in zip(through, direct, strict=True):
            check_equal(ours, theirs)


async def test_with_another_tokenizer_than_the_engines_usage_is_an_estimate(engine: Engine, tmp_path: Path) -> None:
    other = saved(byte_level(), tmp_path / "bytes", None)
    async with (
        in_front_of(engine, tmp_path, other, "refused") as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        asked = bodies()
        direct = [await post(session, engine.url, body) for body in asked]
        through = await ask_all(session, gateway.url, asked)
        for ours, theirs in zip(through, direct, strict=True):
            check_equal(ours, theirs)
        assert "estimated" in {answer[2]["x-gateway-usage"] for answer in through}
        ours_total, theirs_total = (
            sum(answer[1]["usage"]["prompt_tokens"] for answer in answers) for answers in (through, direct)
        )
        assert ours_total == theirs_total
        assert await read(gateway.admin_url, "gateway_embedding_counted_total", result="counted") == 0
        assert await read(gateway.admin_url, "gateway_embedding_counted_total", result="unverified") > 0
