"""Large requests, each on its own connection, and every kind of refusal: what one connection keeps is lost with it."""

from collections.abc import Callable
from math import exp, log
from random import Random
from typing import Any

import orjson

from tests.bench.soak.requests import Planned

REFUSED = 0.05
LEAST_BYTES, MOST_BYTES = 1024, 4 * 1048576
_MAX_BODY_BYTES = 8 * 1048576  # the default of server.max_body_bytes
_WORDS = "words of a long context "
_JSON = b"content-type: application/json\r\n"

# A body that is refused, by a document that is not; and its status.
_REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], bytes], bytes]] = {
    "not JSON": (lambda it: orjson.dumps(it)[:-1], b"400"),
    "a key twice": (lambda it: orjson.dumps(it)[:-1] + b',"model":"x"}', b"400"),
    "a refused field": (lambda it: orjson.dumps({**it, "kv_transfer_params": {}}), b"400"),
    "a media URL": (lambda it: orjson.dumps({**it, "image_url": {"url": "http://a/b"}}), b"400"),
    "nesting": (lambda it: orjson.dumps(it)[:-1] + b',"more":' + b"[" * 200 + b"]" * 200 + b"}", b"400"),
    "containers": (lambda it: orjson.dumps({**it, "more": [[]] * 70_000}), b"400"),
    "strings": (lambda it: orjson.dumps({**it, "more": ["a"] * 70_000}), b"400"),
    "an unknown model": (lambda it: orjson.dumps({**it, "model": "unknown"}), b"404"),
}
_TOO_LARGE, _LEAVES = "too large", "client disconnected in its body"
KINDS = ("chat", *_REFUSALS, _TOO_LARGE, _LEAVES)


class LargeRequests:
    """Makes one after the other: chat, and a share of `REFUSED` that is not answered."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def make(self, number: int) -> Planned:
        """One request. No other may have its number."""
        random, tag = self._random, b"tag-%08x" % number
        size = int(exp(random.uniform(log(LEAST_BYTES), log(MOST_BYTES))))
        text = f"{tag.decode()} {_WORDS * (size // len(_WORDS))}"
        turns = [{"role": "system", "content": text}, {"role": "user", "content": tag.decode()}]
        document = {"model": "fine", "max_tokens": 32, "messages": turns}
        if random.random() >= REFUSED:
            data = _post(orjson.dumps(document))
            return Planned("chat", data, b"200", lambda answer: answer.count(tag) == 1)
        kind = random.choice(KINDS[1:])
        if kind == _TOO_LARGE:
            return Planned(kind, _post(b"x" * 1000, _MAX_BODY_BYTES + 1), b"413", _never)
        if kind == _LEAVES:
            data = _post(orjson.dumps(document))
            return Planned(kind, data[: -len(data) // 4], b"", _never)
        spoil, status = _REFUSALS[kind]
        return Planned(kind, _post(spoil(document)), status, _never)


def _post(body: bytes, length: int = 0) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\n%bcontent-length: %d\r\n\r\n"
    return head % (_JSON, length or len(body)) + body


def _never(answer: bytes) -> bool:
    return False
