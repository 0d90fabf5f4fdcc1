"""Requests of every kind, by a seed, each with what its answer must hold."""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import orjson

from tests.bench.mock_engine import EVENTS, vector_of
from tests.unit.embeddings.rerank_engine import score

CONVERSATIONS = 200
TENANTS = 5_000
_TEXTS = 2_000
_WORDS = "prefix caching keeps the keys and values of tokens that were computed before " * 40
_UPLOAD = b"content-type: multipart/form-data; boundary=b\r\n"
_GARBAGE = b"GARBAGE\0 HTTP/9.9\r\n\r\n"

# Of a hundred requests. The first four begin new conversations or go on with old ones.
SHARES = {
    "chat": 26,
    "stream": 20,
    "new chat": 14,
    "new stream": 9,
    "embeddings": 15,
    "rerank": 4,
    "upload": 3,
    "made-up model": 3,
    "livez": 2,
    "malformed": 2,
    "garbage": 2,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. `status`: what it gets while nothing fails; `holds`: whether a 200 is the answer to it."""

    kind: str
    data: bytes
    status: bytes
    holds: Callable[[bytes], bool]


def _never(answer: bytes) -> bool:
    return False


class Requests:
    """Makes one after the other."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._kinds, self._weights = list(SHARES), list(SHARES.values())
        self._makers = {
            "chat": lambda tag: self._chat(tag, new=False),
            "stream": lambda tag: self._stream(tag, new=False),
            "new chat": lambda tag: self._chat(tag, new=True),
            "new stream": lambda tag: self._stream(tag, new=True),
            "embeddings": self._embeddings,
            "rerank": self._rerank,
            "upload": self._upload,
            "made-up model": self._made_up,
            "livez": self._livez,
            "malformed": self._malformed,
            "garbage": self._garbage,
        }

    def make(self, number: int) -> Planned:
        """One request of a random kind. No other may have its number."""
        (kind,) = self._random.choices(self._kinds, self._weights)
        tag = b"tag-%08x" % number
        data, status, holds = self._makers[kind](tag)
        return Planned(kind, data, status, holds)

    def _post(self, target: bytes, body: bytes, more: bytes = b"") -> bytes:
        tenant = self._random.randrange(TENANTS)
        head = b"POST %b HTTP/1.1\r\nhost: soak\r\nx-tenant: t%d\r\n%bcontent-length: %d\r\n\r\n"
        return head % (target, tenant, more, len(body)) + body

    def _turns(self, tag: bytes, new: bool) -> bytes:
        random = self._random
        begins = tag.decode() if new else f"conversation {random.randrange(CONVERSATIONS)}"
        text = f"{begins} {_WORDS[: random.randrange(200, 2400)]}"
        return b'"messages":[{"role":"system","content":"%b"},{"role":"user","content":"%b"}]' % (text.encode(), tag)

    def _chat(self, tag: bytes, *, new: bool) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        model = b"slow" if self._random.random() < 0.1 else b"fine"
        body = b'{"model":"%b",%b,"max_tokens":32}' % (model, self._turns(tag, new))
        return self._post(b"/v1/chat/completions", body), b"200", lambda answer: answer.count(tag) == 1

    def _stream(self, tag: bytes, *, new: bool) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        body = b'{"model":"fine","stream":true,%b,"max_tokens":32}' % self._turns(tag, new)
        return (
            self._post(b"/v1/chat/completions", body),
            b"200",
            lambda answer: answer.count(tag) == EVENTS and b"data: [DONE]" in answer,
        )

    def _embeddings(self, tag: bytes) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        random = self._random
        texts = [f"text {random.randrange(_TEXTS)} of {random.randrange(4)}" for _ in range(random.randrange(1, 4))]
        body = orjson.dumps({"model": "fine", "input": texts, "encoding_format": "base64"})
        expected = [b64encode(vector_of(text)) for text in texts]

        def holds(answer: bytes) -> bool:
            at = 0
            for vector in expected:
                at = answer.find(vector, at) + 1
                if not at:
                    return False
            return True

        return self._post(b"/v1/embeddings", body), b"200", holds

    def _rerank(self, tag: bytes) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        query = tag.decode()
        documents = [f"document {number}" for number in range(self._random.choice((2, 5, 100)))]
        body = orjson.dumps({"model": "fine", "query": query, "documents": documents})

        def holds(answer: bytes) -> bool:
            results = orjson.loads(answer[answer.find(b"\r\n\r\n") + 4 :])["results"]
            scores = {result["index"]: result["relevance_score"] for result in results}
            return scores == {index: score(query, document) for index, document in enumerate(documents)}

        return self._post(b"/v1/rerank", body), b"200", holds

    def _upload(self, tag: bytes) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        sound = b"\0" * self._random.randrange(100, 20_000)
        body = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nfine\r\n--b\r\n'
        body += b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n%b%b\r\n--b--\r\n' % (tag, sound)
        data = self._post(b"/v1/audio/transcriptions", body, _UPLOAD)
        return data, b"200", lambda answer: answer.count(tag) == 1

    def _made_up(self, tag: bytes) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        body = b'{"model":"%b","messages":[{"role":"user","content":"hi"}]}' % tag
        return self._post(b"/v1/chat/completions", body), b"404", _never

    def _livez(self, tag: bytes) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        return b"GET /livez HTTP/1.1\r\nhost: soak\r\n\r\n", b"200", lambda answer: b"alive" in answer

    def _malformed(self, tag: bytes) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        return self._post(b"/v1/chat/completions", b'{"model":' + tag), b"400", _never

    def _garbage(self, tag: bytes) -> tuple[bytes, bytes, Callable[[bytes], bool]]:
        return _GARBAGE, b"400", _never
