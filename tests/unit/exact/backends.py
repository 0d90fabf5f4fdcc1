"""Backends that tokenize as the fake tokenizer process does, or otherwise."""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from gateway.features.exact.conversation import NotUnderstood
from tests.unit.backends.scripted import Answer
from tests.unit.exact.fake_worker import letters_of


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


def embeds(change: Callable[[str], str] = str, more_tokens: int = 0) -> Answer:
    """An answer to /v1/embeddings, as far as it is looked at; a text is changed before it is tokenized."""

    async def answer(request: web.Request) -> web.StreamResponse:
        text = change((await request.json())["input"])
        return web.json_response({"data": [{}], "usage": {"prompt_tokens": len(text) + 2 + more_tokens}})

    return answer
