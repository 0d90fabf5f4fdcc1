"""Complete answers to the requests of the restart bench, as the gateway would give them."""

from base64 import b64encode
from typing import Any

import orjson

from loadtest.engine.choice import find_nonce
from tests.bench.restarts.requests import Planned


def usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 50, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 32}}


def answer(planned: Planned) -> bytes:
    """The answer that passes the request's check."""
    body = orjson.loads(planned.body)
    if "input" in body:
        count = len(body["input"]) if isinstance(body["input"], list) else 1
        data = [{"index": index, "embedding": b64encode(b"1234").decode()} for index in range(count)]
        return whole(orjson.dumps({"data": data}))
    text = f"nonce:{find_nonce(body['messages'][-1]['content'])} and so on"
    tokens = body["max_tokens"]
    if not body.get("stream"):
        return whole(orjson.dumps({"choices": [{"message": {"content": text}}], "usage": usage(tokens)}))
    chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in (text[:9], text[9:])]
    return stream(*map(orjson.dumps, chunks), orjson.dumps({"choices": [], "usage": usage(tokens)}), b"[DONE]")


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nx-gateway-queue-ms: 12\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def stream(*events: bytes) -> bytes:
    """Each event in a chunk of its own."""
    chunks = [b"data: %b\n\n" % event for event in events]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
