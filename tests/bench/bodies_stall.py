"""How long the worst bodies within the limits stop the event loop, which turns between the steps of reading one.

Everything from the last byte of a body to its place in the queue is timed in this process, as CPU time of the thread:
the guards, the parser, the search for keys, rewriting, the prompt's text and its prefix keys. Each body is filled up to
`server.max_body_bytes`, or to the first of the other limits that it meets.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat

from gateway.config import Config, EmbeddingsConfig, ServerConfig
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import InvalidRequest
from gateway.core.front.http_request import HttpRequest
from gateway.core.front.json_body import MOST_KEYS, JsonLimits
from gateway.core.front.read import RequestReader
from gateway.core.request import InferenceRequest
from gateway.core.routing.estimates import Estimates
from gateway.features.exact.prompts import given_tokens
from gateway.features.keys.settings import KeyConfig
from gateway.features.models.aliases import Aliases
from gateway.features.models.settings import ModelsConfig
from gateway.features.responses.stored import StoredResponses
from tests.routes import find_route

HEAD = "| body | endpoint | MiB | longest step ms | all ms | steps |\n|---|---|--:|--:|--:|---|"
LIMIT_MS = 50.0
_RUNS = 3
_ENDED = object()
_MEBIBYTE = 1048576
_ISOLATED = KeyConfig(name="bench", key="bench", isolate_cache=True)
_PATHS = {
    "chat": b"/v1/chat/completions",
    "completions": b"/v1/completions",
    "embeddings": b"/v1/embeddings",
    "responses": b"/v1/responses",
    "messages": b"/v1/messages",
    "score": b"/score",
    "rerank": b"/rerank",
    "pooling": b"/pooling",
}


@dataclass(frozen=True, slots=True)
class Body:
    """One body, made to be as bad as the limits allow."""

    name: str
    endpoint: str
    make: Callable[[ServerConfig], bytes]


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds that one body took, each step the best of some runs: the longest step, and all of them."""

    name: str
    endpoint: str
    size_bytes: int
    longest_ms: float
    all_ms: float
    steps_ms: list[float]

    def row(self) -> str:
        mebibytes = self.size_bytes / _MEBIBYTE
        return (
            f"| {self.name} | {self.endpoint} | {mebibytes:.2f} | {self.longest_ms:.1f} | {self.all_ms:.1f}"
            f" | {', '.join(map(str, self.steps_ms))} |"
        )


def measure(limits: ServerConfig, named: str = "") -> Iterator[Timing]:
    """Time every body whose name contains `named`."""
    config = Config(
        backends=(BackendConfig(url="http://127.0.0.1:1"),),
        server=limits,
        embeddings=EmbeddingsConfig(),
        models=ModelsConfig(aliases={"alias": "model"}),
    )
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the gateway has it
    reader = RequestReader(
        config,
        estimates=Estimates(),
        stored=StoredResponses(),
        salt_secret=b"secret",
        tokenized=("model",),
        names=Aliases.configured(config.models, {}),
    )
    for body in bodies():
        if named in body.name:
            yield _timing(body, reader, limits)


def _timing(body: Body, reader: RequestReader, limits: ServerConfig) -> Timing:
    data = body.make(limits)
    assert len(data) <= limits.max_body_bytes, (body.name, len(data))
    incoming = HttpRequest()
    incoming.method, incoming.path, incoming.body = b"POST", _PATHS[body.endpoint], data
    incoming.key = _ISOLATED
    route = find_route(incoming.method, incoming.path)

    def read() -> Iterator[None]:
        try:
            request: InferenceRequest = yield from reader.read_in_steps(incoming, route, "id", lambda: "model")
            yield
            if request.document is not None:
                given_tokens(request.document, request.endpoint)
        except InvalidRequest as error:
            if "not valid JSON" in error.message or "server.max_json_" in error.message:
                raise

    runs = [_steps(read()) for _ in range(_RUNS)]
    steps = [min(each) for each in zip(*runs, strict=True)]
    return Timing(body.name, body.endpoint, len(data), max(steps), sum(steps), [round(step, 1) for step in steps])


def _steps(work: Iterator[None]) -> list[float]:
    """Milliseconds of each step."""
    gc.collect()
    taken, ended = [], False
    while not ended:
        before = time.thread_time()
        ended = next(work, _ENDED) is _ENDED  # what it made is gone when it ends: that takes time, too
        taken.append((time.thread_time() - before) * 1000)
    return taken


def bodies() -> Iterator[Body]:
    """The worst that is known, of every kind."""
    for name, text in _TEXTS.items():
        yield Body(f"one string of {name}", "chat", lambda limits, t=text: _chat(_filled(t, limits)))
    for name, text in _TEXTS.items():
        yield Body(f"one string of {name}, nested model", "chat", lambda limits, t=text: _nested(_filled(t, limits)))
    yield Body("one image", "chat", lambda limits: _image(limits))
    for name, text in _TEXTS.items():
        for endpoint, before, after in _STRING_PLACES:
            yield Body(
                f"{name} in {before[-14:].decode().strip()}",
                endpoint,
                lambda limits, t=text, b=before, a=after: _in_string(b, _filled(t, limits), a),
            )
    lists = [*((each, _LIST_PLACES) for each in _LISTS.items()), *((each, _OBJECT_PLACES) for each in _MEMBERS.items())]
    for (name, value), places in lists:
        for endpoint, before, after in places:
            yield Body(
                f"{name} in {before[-14:].decode().strip()}",
                endpoint,
                lambda limits, v=value, b=before, a=after: _in_list(b, v(), a, limits),
            )


_TEXTS = {
    "ASCII": b"words and ",
    "two-byte letters": "éà".encode(),
    "three-byte letters": "你好".encode(),
    "emoji": "😀".encode(),
    "ASCII and one emoji": b"",
    "backslashes": b"\\\\",
    "quotation marks": b'\\"',
    "newlines": b"\\n",
    "escaped letters": b"\\u0061",
    "escaped emoji": b"\\ud83d\\ude00",
    "brackets": b"}]",
    "colons": b":/:/",
    "u, r and l": b"urur",
}
_SALT = b'{"model":"alias","cache_salt":"salt","stream":true,"x":{"model":"b","cache_salt":"c"},'
_STRING_PLACES = (
    ("completions", _SALT + b'"prompt":"', b'"}'),
    ("responses", _SALT + b'"input":"', b'"}'),
    ("embeddings", b'{"model":"alias","input":"', b'"}'),
    ("messages", _SALT + b'"system":"', b'"}'),
    ("chat", _SALT + b'"messages":[],"tools":"', b'"}'),
    ("chat", _SALT + b'"messages":[],"tools":[{"description":"', b'"}]}'),
    ("chat", _SALT + b'"messages":[],"prompt_cache_key":"', b'"}'),
    ("rerank", b'{"model":"alias","query":"a","documents":["', b'","a"]}'),
)


def _numbers(template: bytes) -> Iterator[bytes]:
    number = 1000000
    while True:
        number += 1
        yield template % number


_LISTS: dict[str, Callable[[], Iterator[bytes]]] = {
    "digits": lambda: repeat(b"1"),
    "ids": lambda: _numbers(b"%d"),
    "long ids": lambda: _numbers(b"21474%d"),
    "long integers": lambda: _numbers(b"12345678901234%d"),
    "too long integers": lambda: _numbers(b"12345678901234567890%d"),
    "floats": lambda: _numbers(b"0.%d"),
    "long floats": lambda: _numbers(b"0.%d98765432123"),
    "longer floats": lambda: _numbers(b"-1.%d9876543212345678987e-210"),
    "null": lambda: repeat(b"null"),
    "empty strings": lambda: repeat(b'""'),
    "short strings": lambda: _numbers(b'"%d"'),
    "strings of an emoji": lambda: _numbers(b'"\xf0\x9f\x98\x80%d"'),
    "strings with quotation marks": lambda: _numbers(b'"%d\\""'),
    "strings with escapes": lambda: _numbers(b'"%d\\u0061"'),
    "strings that say model": lambda: repeat(b'"model"'),
    "empty lists": lambda: repeat(b"[]"),
    "lists of an id": lambda: _numbers(b"[%d]"),
    "lists of a string": lambda: _numbers(b'["%d"]'),
    "objects": lambda: _numbers(b'{"%d":1}'),
    "objects with a model": lambda: _numbers(b'{"model":%d}'),
    "objects with quotation marks": lambda: _numbers(b'{"a\\"%d":"\\""}'),
    "small parts": lambda: repeat(b'{"type":"text","text":""}'),
    "parts": lambda: _numbers(b'{"type":"text","text":"%d"}'),
    "image parts": lambda: _numbers(b'{"type":"image_url","image_url":"data:%d"}'),
    "messages": lambda: _numbers(b'{"role":"user","content":"%d"}'),
    "messages with a name": lambda: _numbers(b'{"role":"user","content":"%d","name":"a"}'),
    "messages of parts": lambda: _numbers(b'{"role":"user","content":["%d"]}'),
    "deep lists": lambda: _numbers(b"[" * 60 + b"%d" + b"]" * 60),
}
_LIST_PLACES = (
    ("completions", _SALT + b'"prompt":[', b"]}"),
    ("completions", _SALT + b'"prompt":[[', b"]]}"),
    ("embeddings", b'{"model":"alias","input":[', b"]}"),
    ("chat", _SALT + b'"messages":[', b"]}"),
    ("chat", _SALT + b'"messages":[{"role":"user","content":[', b"]}]}"),
    ("chat", _SALT + b'"messages":[],"tools":[', b"]}"),
    ("messages", _SALT + b'"messages":[{"role":"user","content":[', b"]}]}"),
    ("responses", _SALT + b'"input":[', b"]}"),
    ("pooling", b'{"model":"alias","url":"data:","data":[', b"]}"),
    ("pooling", b'{"model":"alias","urls":[', b"]}"),
)
_MEMBERS: dict[str, Callable[[], Iterator[bytes]]] = {
    "keys": lambda: _numbers(b'"%d":1'),
    "keys that end in url": lambda: _numbers(b'"%durl":""'),
    "keys with escapes": lambda: _numbers(b'"\\u0061%d":1'),
}
_OBJECT_PLACES = (
    ("chat", _SALT + b'"messages":[],"x":{', b"}}"),
    ("chat", _SALT + b'"messages":[],', b"}"),
    ("chat", _SALT + b'"messages":[{"role":"user","content":"a","name":"b",', b"}]}"),
    ("messages", _SALT + b'"messages":[{"role":"user","content":[{"type":"image",', b"}]}]}"),
)


def _filled(text: bytes, limits: ServerConfig) -> bytes:
    room = limits.max_body_bytes - 300
    if not text:
        return b"a" * (room - 4) + "😀".encode()
    count = room // len(text)
    return text * count + b"a" * (room - count * len(text))


def _in_string(before: bytes, text: bytes, after: bytes) -> bytes:
    return before + text + after


def _in_list(before: bytes, values: Iterator[bytes], after: bytes, limits: ServerConfig) -> bytes:
    first = next(values)
    head = before + first + after
    size = len(first) + 1
    count = (limits.max_body_bytes - len(head)) // size
    most = JsonLimits(limits)
    if quotes := first.count(b'"') - first.count(b'\\"'):
        count = min(count, 2 * (most.strings - 24) // quotes)
    if keys := first.count(b":"):
        count = min(count, (most.strings // 2 - 24) // keys, MOST_KEYS - 24 if first[:1] == b'"' else count)
    if containers := first.count(b"[") + first.count(b"{"):
        count = min(count, (most.containers - 8) // containers)
    if quotes or containers:  # lists of numbers have no other limit than the bytes
        count = min(count, (most.values - 24) // (first.count(b",") + 1))
    return before + b",".join(islice(values, count)) + after


def _chat(text: bytes) -> bytes:
    return b'{"model":"alias","cache_salt":"salt","messages":[{"role":"user","content":"' + text + b'"}]}'


def _nested(text: bytes) -> bytes:
    return _SALT + b'"messages":[{"role":"user","content":"' + text + b'"}]}'


def _image(limits: ServerConfig) -> bytes:
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + _filled(b"QUJD", limits) + b'"}}'
    return b'{"model":"alias","messages":[{"role":"user","content":[' + part + b"]}]}"
