"""Small requests to servers with a timeout, and their answers. What a server does not offer is None."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import aiohttp
import orjson

from loadtest.access import Access
from loadtest.checkpoint import redaction
from loadtest.workloads.prompts import Endpoint

ASK_SECONDS = 10.0
# A cold engine may take long over its first answer, and a loaded machine over any.
ANSWER_SECONDS = 120.0


def open_asker(access: Access) -> aiohttp.ClientSession:
    """A session for questions: no proxies, no cookies; each question has a connection of its own."""
    headers = {"accept-encoding": "identity", "user-agent": "loadtest-check"} | dict(access.headers)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True, ssl=access.tls()),
        timeout=aiohttp.ClientTimeout(total=ASK_SECONDS),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


class Unreachable(Exception):
    """Nothing answers at the URL."""


async def get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    try:
        async with session.get(url, allow_redirects=False) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise Unreachable(redaction.text(f"{url}: {error or type(error).__name__}")) from None


async def get_text(session: aiohttp.ClientSession, url: str) -> str | None:
    """The page; None where there is none."""
    try:
        status, body = await get(session, url)
    except Unreachable:
        return None
    return body.decode("utf-8", "replace") if status == 200 else None


async def get_object(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """The JSON object; None where there is none."""
    page = await get_text(session, url)
    return None if page is None else parsed(page)


async def post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[int, bytes, str | None]:
    """Status, body, and the backend that the gateway names. Raises Unreachable."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        async with session.post(url, json=body, allow_redirects=False, timeout=timeout) as response:
            return response.status, await response.read(), response.headers.get("x-gateway-backend")
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise Unreachable(redaction.text(f"{url}: {error or type(error).__name__}")) from None


def parsed(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that the text is, if it is one."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


QUESTION = "Count from one to ten:"
TEXTS = ("The river was low that summer.", "Interest rates rose by a quarter of a point.")
_MAX_TOKENS = 16
_DONE = b"data: [DONE]"
_SPOKEN = ("reasoning", "reasoning_content", "content", "text")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every server alike. `new_salt` makes a server compute each answer from its beginning."""

    model: str
    endpoint: Endpoint
    extra: Mapping[str, Any]
    _: KW_ONLY
    new_salt: Callable[[], str] | None = None

    def body(self, *, stream: bool) -> dict[str, Any]:
        """Greedy, and without what a workload adds to make answers long."""
        asked: dict[str, Any] = (
            {"prompt": QUESTION}
            if self.endpoint is Endpoint.COMPLETIONS
            else {"messages": [{"role": "user", "content": QUESTION}]}
        )
        asked |= {"model": self.model, "max_tokens": _MAX_TOKENS, "temperature": 0, "seed": 0, "stream": stream}
        if self.new_salt is not None:
            asked["cache_salt"] = self.new_salt()
        return dict(self.extra) | asked | ({"stream_options": {"include_usage": True}} if stream else {})


@dataclass(frozen=True, slots=True)
class Said:
    """A generated answer, or `error`, why there is none."""

    text: str = ""
    prompt_tokens: int | None = None
    _: KW_ONLY
    completion_tokens: int | None = None
    backend: str | None = None
    error: str = ""
    ended: str = ""  # a stream's end that is not as it should be

    @property
    def usage(self) -> str:
        return f"{self.prompt_tokens} + {self.completion_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors, or `error`, why there are none."""

    vectors: Sequence[Sequence[float]] = ()
    prompt_tokens: int | None = None
    error: str = ""


async def ask(session: aiohttp.ClientSession, url: str, question: Question, *, stream: bool = False) -> Said:
    try:
        status, body, backend = await post(session, url + question.endpoint.path, question.body(stream=stream))
    except Unreachable as why:
        return Said(error=str(why))
    if status != 200:
        return Said(error=f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}")
    return streamed(body, backend) if stream else whole(body, backend)


def whole(body: bytes, backend: str | None = None) -> Said:
    """An answer that came in one piece."""
    answer = parsed(body)
    if answer is None or not answer.get("choices"):
        return Said(error=f"no answer: {body[:200].decode('utf-8', 'replace')}")
    prompt_tokens, completion_tokens = _usage(answer)
    return Said(_spoken(answer), prompt_tokens, completion_tokens=completion_tokens, backend=backend)


def streamed(body: bytes, backend: str | None = None) -> Said:
    """A stream that has ended; `ended` says if its end is not exactly one [DONE]."""
    lines = [line.strip() for line in body.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:")]
    events = [event for line in lines if line != _DONE and (event := parsed(line[5:])) is not None]
    if errors := [event["error"] for event in events if event.get("error")]:
        return Said(error=f"an error in the stream: {orjson.dumps(errors[0])[:200].decode()}")
    dones = lines.count(_DONE)
    ended = ""
    if dones != 1:
        ended = f"{dones} times [DONE]"
    elif lines[-1] != _DONE:
        ended = f"after [DONE]: {lines[-1][:80].decode('utf-8', 'replace')}"
    last: Mapping[str, Any] = next((event for event in reversed(events) if event.get("usage")), {})
    prompt_tokens, completion_tokens = _usage(last)
    return Said(
        "".join(map(_spoken, events)), prompt_tokens, completion_tokens=completion_tokens, backend=backend, ended=ended
    )


async def embed(session: aiohttp.ClientSession, url: str, model: str) -> Embedded:
    asked = {"model": model, "input": list(TEXTS), "encoding_format": "float"}
    try:
        status, body, _ = await post(session, url + Endpoint.EMBEDDINGS.path, asked)
    except Unreachable as why:
        return Embedded(error=str(why))
    answer = parsed(body)
    if status != 200 or answer is None:
        return Embedded(error=f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}")
    try:
        data = sorted(answer["data"], key=lambda each: int(each["index"]))
        vectors = [[float(number) for number in each["embedding"]] for each in data]
    except (KeyError, TypeError, ValueError) as error:
        return Embedded(error=f"not a list of vectors: {error!r}")
    return Embedded(vectors, _usage(answer)[0])


def least_cosine(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Over the pairs; -1 where numbers or dimensions differ, or a vector has no length."""
    if len(ours) != len(theirs) or not ours:
        return -1.0
    return min(_cosine(one, other) for one, other in zip(ours, theirs, strict=True))


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    if len(one) != len(other) or not lengths:
        return -1.0
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths


def _spoken(answer: Mapping[str, Any]) -> str:
    """What the first choice says, thoughts included."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    said = choice.get("delta") or choice.get("message") or choice
    return "".join(value for name in _SPOKEN if isinstance(value := said.get(name), str))


def _usage(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = answer.get("usage") or {}
    return usage.get("prompt_tokens"), usage.get("completion_tokens")
