"""The requests of the restart bench, by a seed, each with the check of its answer. Pure.

Chats begin with one of many prefixes, which do not all fit in one engine's cache, or continue a session. Each prompt
ends with a nonce, which the simulated engine repeats: an answer proves that it belongs to its request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

CHAT_MODEL, EMBEDDING_MODEL = "chat", "embed"
TOKENS_PER_SECOND = 65  # of a stream, about, at the speed of the bench's engines
PREFIXES = 800
SESSIONS = 60
_TURNS = 8
_PREFIX_WORDS = 150
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
# Of a hundred short requests.
SHARES = {"chat": 30, "stream": 24, "session": 11, "session stream": 10, "embedding": 24.5, "embedding list": 0.5}
STREAMS = frozenset({"stream", "session stream", "long stream"})
CHATS = frozenset({"chat", "stream", "session", "session stream"})


class WrongAnswer(Exception):
    """An answer is not the complete answer to its request; the message says why."""


@dataclass(frozen=True)
class Usage:
    """What an answer reports of its prompt."""

    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Planned:
    """One request. `check` raises WrongAnswer."""

    kind: str
    path: str
    body: bytes
    check: Callable[[bytes], Usage]

    def data(self, *, closes: bool) -> bytes:
        """The request as sent, on a connection that is closed afterwards or kept."""
        head = f"POST {self.path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        close = "connection: close\r\n" if closes else ""
        return f"{head}{close}content-length: {len(self.body)}\r\n\r\n".encode() + self.body


@dataclass
class Session:
    """A conversation that grows by one turn at a time."""

    messages: list[dict[str, str]]
    is_waiting: bool = False


class Requests:
    """Makes one after the other."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._number = 0
        self._tag = f"{seed:x}"
        prefixes = Random(0)  # the same ones for each seed, so that a later load finds the engines' caches warm
        self._prefixes = [
            " ".join([f"prefix {each}", *prefixes.choices(_WORDS, k=_PREFIX_WORDS)]) for each in range(PREFIXES)
        ]
        self._sessions = [self._new_session() for _ in range(SESSIONS)]
        self._kinds, self._weights = list(SHARES), list(SHARES.values())

    def short(self) -> Planned:
        """A request that is answered soon, of a random kind."""
        (kind,) = self._random.choices(self._kinds, self._weights)
        if kind == "embedding":
            return self._embeddings(kind, 1)
        if kind == "embedding list":
            return self._embeddings(kind, self._random.randrange(70, 150))
        tokens = self._random.randrange(6, 13)
        if kind.startswith("session"):
            return self._turn(kind, tokens)
        return self._chat(kind, [_system(self._prefix()), _user(self._words(20))], tokens)

    def long(self, seconds: float) -> Planned:
        """A stream that takes about so long."""
        messages = [_system(self._prefix()), _user(self._words(20))]
        return self._chat("long stream", messages, max(4, int(seconds * TOKENS_PER_SECOND)))

    def _prefix(self) -> str:
        return self._random.choice(self._prefixes)

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=count))

    def _new_session(self) -> Session:
        return Session([_system(f"session {self._random.getrandbits(60):x} {self._words(40)}")])

    def _turn(self, kind: str, tokens: int) -> Planned:
        at = self._random.randrange(SESSIONS)
        if self._sessions[at].is_waiting or len(self._sessions[at].messages) > 2 * _TURNS:
            self._sessions[at] = self._new_session()
        session = self._sessions[at]
        session.is_waiting = True
        return self._chat(kind, [*session.messages, _user(self._words(15))], tokens, session)

    def _chat(self, kind: str, messages: list[dict[str, str]], tokens: int, session: Session | None = None) -> Planned:
        self._number += 1
        nonce = f"{self._tag}-{self._number:x}"
        messages[-1]["content"] += f" nonce:{nonce}"
        body: dict[str, Any] = {"model": CHAT_MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
        is_stream = kind in STREAMS
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}

        def check(answer: bytes) -> Usage:
            text, usage = (streamed if is_stream else whole)(answer, tokens)
            if f"nonce:{nonce}" not in text:
                raise WrongAnswer(f"the answer to another request: {text[:60]!r}")
            if session is not None:
                session.messages = [*messages, {"role": "assistant", "content": text}]
                session.is_waiting = False
            return usage

        return Planned(kind, "/v1/chat/completions", orjson.dumps(body), check)

    def _embeddings(self, kind: str, count: int) -> Planned:
        texts = [self._words(6) for _ in range(count)]
        given = texts if count > 1 else texts[0]
        body = {"model": EMBEDDING_MODEL, "input": given, "encoding_format": "base64"}

        def check(answer: bytes) -> Usage:
            indexes = [each["index"] for each in _json(answer)["data"] if each["embedding"]]
            if indexes != list(range(count)):
                raise WrongAnswer(f"{len(indexes)} embeddings of {count}")
            return Usage()

        return Planned(kind, "/v1/embeddings", orjson.dumps(body), check)


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def body_of(answer: bytes) -> bytes:
    """The body of a complete answer with status 200. Raises WrongAnswer."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        raise WrongAnswer(f"closed after {len(answer)} bytes" if answer else "closed without an answer")
    if answer[9:12] != b"200":
        raise WrongAnswer(f"status {answer[9:12].decode()}: {body[:200].decode(errors='replace')}")
    if b"\r\ntransfer-encoding: chunked" in head:
        return _dechunked(body)
    length = int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0] or -1)
    if len(body) != length:
        raise WrongAnswer(f"closed after {len(body)} bytes of {length}")
    return body


def _dechunked(body: bytes) -> bytes:
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:end], 16)
        if not size:
            if body[end:] == b"\r\n\r\n":
                return b"".join(parts)
            break
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    raise WrongAnswer(f"closed in the body, which ends with {body[-120:].decode(errors='replace')!r}")


def _json(answer: bytes) -> Any:
    try:
        return orjson.loads(body_of(answer))
    except orjson.JSONDecodeError as error:
        raise WrongAnswer(f"invalid JSON: {error}") from None


def whole(answer: bytes, tokens: int) -> tuple[str, Usage]:
    """Text and usage of a chat answer of so many tokens. Raises WrongAnswer."""
    content = _json(answer)
    return content["choices"][0]["message"]["content"], _usage(content["usage"], tokens)


def streamed(answer: bytes, tokens: int) -> tuple[str, Usage]:
    """The same of a stream, which has to end with [DONE]."""
    *events, rest = body_of(answer).split(b"\n\n")
    if rest or not events or events[-1] != b"data: [DONE]":
        raise WrongAnswer(f"a stream without [DONE]: {(events or [rest])[-1][:200].decode(errors='replace')}")
    pieces: list[str] = []
    usage = None
    for event in events[:-1]:
        if event.startswith(b":"):
            continue
        chunk = orjson.loads(event.removeprefix(b"data: "))
        usage = chunk.get("usage") or usage
        pieces += [choice["delta"].get("content") or "" for choice in chunk.get("choices", [])]
    if usage is None:
        raise WrongAnswer(f"a stream without usage: {events[-2][:200].decode(errors='replace')}")
    return "".join(pieces), _usage(usage, tokens)


def _usage(usage: dict[str, Any], tokens: int) -> Usage:
    if usage["completion_tokens"] != tokens:
        raise WrongAnswer(f"{usage['completion_tokens']} tokens of {tokens}")
    return Usage(usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def queue_ms(answer: bytes) -> float:
    """How long the request waited in the gateway's queue, by the answer's header."""
    value = answer[: answer.find(b"\r\n\r\n")].partition(b"\r\nx-gateway-queue-ms: ")[2].partition(b"\r\n")[0]
    return float(value or 0)
