"""POST /tokenize and /detokenize."""

from typing import Any

from aiohttp import web

from loadtest.engine.api.errors import invalid, missing
from loadtest.engine.api.exchange import json_answer, read_json, read_messages, read_token_ids
from loadtest.engine.ledger import Entry
from loadtest.engine.service import Service
from loadtest.engine.tokens import from_ids, render_chat, tokenise


async def tokenize(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    """The tokens of a text or of a chat."""
    body = await read_json(request)
    service.check_model(body.get("model"))
    if body.get("messages") is not None:
        text = render_chat(read_messages(body), bool(body.get("add_generation_prompt", True)))
    elif isinstance(body.get("prompt"), str):
        text = body["prompt"]
    elif body.get("prompt") is None:
        raise missing("prompt", body)
    else:
        raise invalid("body.prompt", "string_type", "Input should be a valid string", body["prompt"])
    ids = tokenise(text).ids()
    strings: list[str] | None = None
    if body.get("return_token_strs"):
        strings = [from_ids([token]).text() for token in ids]
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.config.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return json_answer(answer)


async def detokenize(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:  # noqa: ARG001
    body = await read_json(request)
    service.check_model(body.get("model"))
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise missing("tokens", body)
    return json_answer({"prompt": from_ids(read_token_ids(tokens)).text()})
