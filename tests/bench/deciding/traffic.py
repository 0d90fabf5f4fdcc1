"""Requests as the gateway reads them: real bodies of 4k to 16k tokens, in groups that share half of their prompt."""

from collections.abc import Iterator, Sequence
from itertools import islice

import orjson

from gateway.config import Config
from gateway.core.backends.settings import BackendConfig
from gateway.core.front.http_request import KNOWN_HEADERS, HttpRequest
from gateway.core.front.read import RequestReader
from gateway.core.request import Demand, InferenceRequest
from gateway.core.routing.estimates import Estimates
from gateway.features.responses.stored import StoredResponses
from tests.bench.bodies import chats
from tests.routes import find_route

MODEL = "mock"
_SIZES_BYTES = (16_384, 28_672, 40_960, 53_248, 65_536)
_PATH = b"/v1/chat/completions"


def reader(estimates: Estimates) -> RequestReader:
    """The gateway's, with its usual limits."""
    return RequestReader(
        Config(backends=(BackendConfig(url="http://127.0.0.1:1"),)),
        estimates=estimates,
        stored=StoredResponses(),
        salt_secret=b"salt",
    )


def incoming(body: bytes) -> HttpRequest:
    """A chat request as it came over the wire."""
    made = HttpRequest()
    headers = [(b"host", b"gateway"), (b"content-type", b"application/json")]
    made.take_head(b"POST", _PATH, "1.1", headers, KNOWN_HEADERS)
    made.body, made.route = body, find_route(b"POST", _PATH)
    return made


def read(through: RequestReader, made: HttpRequest) -> InferenceRequest:
    """What the gateway makes of it."""
    assert made.route is not None
    return through.read(made, made.route, "request-1", lambda: MODEL)


def bodies(count: int, sizes: Sequence[int] = _SIZES_BYTES) -> Iterator[bytes]:
    """So many streamed chats, of these sizes in turn."""
    sources = [chats(size, seed=size) for size in sizes]
    for number in range(count):
        yield orjson.dumps(next(sources[number % len(sources)]) | {"stream": True, "max_tokens": 256})


def asks(estimates: Estimates, count: int) -> list[Demand]:
    """What placement is asked for so many chats."""
    through = reader(estimates)
    return [read(through, incoming(body)).demand for body in islice(bodies(count), count)]
