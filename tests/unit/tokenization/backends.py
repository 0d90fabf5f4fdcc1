"""Backends that tokenize as the fake tokenizer process does, or otherwise."""

import hashlib
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
from aiohttp import web

from gateway.tokenization.conversation import NotUnderstood
from tests.unit.backends.scripted import Answer
from tests.unit.tokenization.fake_worker import letters_between, letters_of


def tokenizes(content_format: str = "string", shift: int = 0, without: tuple[str, ...] = ()) -> Answer:
    """An answer to /tokenize; `shift` makes it differ, prompts with a field of `without` are refused."""

    async def answer(request: web.Request) -> web.StreamResponse:
        document: dict[str, Any] = await request.json()
        assert document.pop("model") == "m"
        endpoint = "completions" if "prompt" in document else "chat"
        try:
            if not document.keys().isdisjoint(without):
                raise NotUnderstood("refused")
            text = letters_of(endpoint, document, content_format)
        except NotUnderstood as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        tokens = [ord(letter) + shift for letter in text]
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    return answer


def embeds(change: Callable[[str], str] = str, more_tokens: int = 0, noise: float = 0.0) -> Answer:
    """An answer to /v1/embeddings; texts are changed before they are tokenized, and vectors of ids by some noise."""

    async def answer(request: web.Request) -> web.StreamResponse:
        document: dict[str, Any] = await request.json()
        given = document["input"]
        lists = [letters_between(change(each)) if isinstance(each, str) else each for each in given]
        data = []
        for index, (each, ids) in enumerate(zip(given, lists, strict=True)):
            seed = int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:4], "big")
            vector = np.random.default_rng(seed).normal(size=16)
            if not isinstance(each, str):
                vector = vector + noise * np.linalg.norm(vector)
            data.append({"index": index, "embedding": b64encode(vector.astype("<f4").tobytes()).decode()})
        usage = {"prompt_tokens": sum(map(len, lists)) + more_tokens}
        return web.json_response({"data": data[::-1], "usage": usage})

    return answer
