"""The bytes of hostile requests, each as large as the limits allow."""

import sys
from collections.abc import Sequence

import orjson

from gateway.config import ServerConfig
from gateway.core.front.json_body import MOST_KEYS, JsonLimits

CHAT = b"/v1/chat/completions"
_START = b'{"model":"fine","messages":[{"role":"user","content":"hi"}],"x":'
_FORM = b"content-type: multipart/form-data; boundary=b"
_SPARE_BYTES = 4096


def request(body: bytes, target: bytes = CHAT, *headers: bytes, method: bytes = b"POST") -> bytes:
    lines = (b"%b %b HTTP/1.1" % (method, target), b"host: bench", *headers, b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chat(model: str = "fine", **more: object) -> bytes:
    document = {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}
    return request(orjson.dumps(document), CHAT)


def unfinished(size: int, sent: int, target: bytes = CHAT, method: bytes = b"POST", *headers: bytes) -> bytes:
    """A request whose body is announced with `size` bytes, of which only `sent` come."""
    lines = (b"%b %b HTTP/1.1" % (method, target), b"host: bench", *headers, b"content-length: %d" % size)
    return b"\r\n".join(lines) + b"\r\n\r\n" + b" " * sent


def _with_field(value: bytes) -> bytes:
    return _START + value + b"}"


def _numbers(limits: ServerConfig, number: bytes) -> bytes:
    return _listed(limits, number, sys.maxsize)


def _listed(limits: ServerConfig, item: bytes, most: int) -> bytes:
    room = min(most, (limits.max_body_bytes - _SPARE_BYTES) // (len(item) + 1))
    return b"[" + b",".join([item] * room) + b"]"


def rerank_query(limits: ServerConfig) -> bytes:
    """A long query that is not ASCII, and as many documents as there may be strings."""
    documents = min(60_000, JsonLimits(limits).strings - 100)
    size = limits.max_body_bytes - 4 * documents - _SPARE_BYTES
    query = "é" * (size // 2)
    body = b'{"model":"no-such-model","query":"%b","documents":[%b]}'
    return request(body % (query.encode(), b",".join([b'"x"'] * documents)), b"/rerank")


def rerank_amplification() -> bytes:
    """A query above a batch's tokens, so that each document may become a piece with the whole query."""
    document = {"model": "fine", "query": "word " * 40_000, "documents": [f"{n}" for n in range(2_000)]}
    return request(orjson.dumps(document), b"/rerank")


def rerank(documents: int, size_bytes: int, *headers: bytes) -> bytes:
    each = size_bytes // documents
    texts = [f"{number} ".ljust(each, "y") for number in range(documents)]
    return request(orjson.dumps({"model": "fine", "query": "q", "documents": texts}), b"/rerank", *headers)


def brackets(limits: ServerConfig) -> bytes:
    """Some more opening brackets than may be nested, then nothing but closing ones."""
    opened = b"[" * (limits.max_json_depth + 1)
    return request(_with_field(opened + b"]" * (limits.max_body_bytes - len(opened) - _SPARE_BYTES)))


def alias_of_strings(limits: ServerConfig) -> bytes:
    """An alias, to be replaced beside a nested field of its name that holds a huge string."""
    text = b"y" * (limits.max_body_bytes - _SPARE_BYTES)
    return request(_with_field(b'{"model":"%b"}' % text).replace(b'"fine"', b'"alias"', 1))


def alias_of_numbers(limits: ServerConfig) -> bytes:
    """The same with an escaped name and many numbers."""
    body = b'{"mod\\u0065l":"alias","messages":[{"role":"user","content":"hi"}],"x":%b}'
    return request(body % _numbers(limits, b"0.12345678901234567"))


def form_lines() -> bytes:
    """An upload of lines that each almost name the model, many times."""
    line = b"content-disposition: " + b"name=model;" * 22 + b"\r\n"
    return request(line * (1_200_000 // len(line)), b"/v1/audio/transcriptions", _FORM)


def trailers(limits: ServerConfig) -> bytes:
    """Half a body, and as much of trailers."""
    size = limits.max_body_bytes // 2
    return _chunked(b"%x\r\n%b\r\n" % (size, b" " * size), b"a:b\r\n" * (size // 5))


def tiny_chunks(limits: ServerConfig) -> bytes:
    """Half a body in chunks of five bytes."""
    return _chunked(b"5\r\n     \r\n" * (limits.max_body_bytes // 10))


def _chunked(chunks: bytes, trailer: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: bench\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT
    return head + chunks + b"0\r\n" + trailer + b"\r\n"


def floats(limits: ServerConfig) -> bytes:
    """A field of many long numbers."""
    return request(_with_field(_numbers(limits, b"0.12345678901234567")))


def token_ids(limits: ServerConfig) -> bytes:
    """A prompt of many token ids."""
    return request(b'{"model":"fine","prompt":%b}' % _numbers(limits, b"12345"), b"/v1/completions")


def digits(limits: ServerConfig) -> bytes:
    """A prompt of token ids of one digit: as many values as a body can have."""
    return request(b'{"model":"fine","prompt":%b}' % _numbers(limits, b"1"), b"/v1/completions")


def embeddings_digits(limits: ServerConfig) -> bytes:
    return request(b'{"model":"fine","input":%b}' % _numbers(limits, b"1"), b"/v1/embeddings")


def nulls(limits: ServerConfig) -> bytes:
    """A conversation that is a list of nulls."""
    return request(b'{"model":"fine","messages":%b}' % _numbers(limits, b"null"))


def parts(limits: ServerConfig) -> bytes:
    """A message of as many parts as there may be objects, which fill the body."""
    part = b'{"type":"text","text":"%b"}' % (b"y" * 22)
    content = _listed(limits, part, JsonLimits(limits).containers - 100)
    body = b'{"model":"alias","max_tokens":9,"messages":[{"role":"user","content":%b}]}' % content
    return request(body, b"/v1/messages")


def keys(limits: ServerConfig) -> bytes:
    """An object of as many keys as there may be."""
    members = b",".join(b'"%d":%b' % (number, b"1" * 50) for number in range(MOST_KEYS))
    return request(_with_field(b"{%b}" % members[: limits.max_body_bytes - _SPARE_BYTES].rpartition(b",")[0]))


def embeddings_ids(limits: ServerConfig) -> bytes:
    """Embeddings of many lists of token ids."""
    return request(
        b'{"model":"fine","input":[%b]}' % b",".join([b"[%b]" % b",".join([b"1234"] * 240)] * 2_000), b"/v1/embeddings"
    )


def long_text(limits: ServerConfig) -> bytes:
    """One huge message, all of it beyond ASCII."""
    text = "é" * ((limits.max_body_bytes - _SPARE_BYTES) // 2)
    return request(_with_field(b"1").replace(b'"hi"', b'"%b"' % text.encode()))


def backslashes(limits: ServerConfig) -> bytes:
    return request(_with_field(b'"%b"' % (b"\\" * 2 * ((limits.max_body_bytes - _SPARE_BYTES) // 2))))


def tool_of_escapes(limits: ServerConfig) -> bytes:
    """A tool whose description is all escapes: it is printed anew for the prompt's text."""
    text = b"\\n" * ((limits.max_body_bytes - _SPARE_BYTES) // 2)
    return request(_with_field(b"1").replace(b'"x":1', b'"tools":[{"description":"%b"}]' % text))


def quotation_marks(limits: ServerConfig) -> bytes:
    """One huge string of escaped quotation marks."""
    return request(_with_field(b'"%b"' % (b'\\"' * ((limits.max_body_bytes - _SPARE_BYTES) // 2))))


def strings(limits: ServerConfig) -> bytes:
    """As many strings as may be, filling the body."""
    count = JsonLimits(limits).strings - 100
    text = b'"%b"' % (b"\\n" * ((limits.max_body_bytes - _SPARE_BYTES - 3 * count) // count // 2))
    return request(_with_field(b"[" + b",".join([text] * count) + b"]"))


def session(limits: ServerConfig) -> bytes:
    """A cache key that is a list instead of a string."""
    text = b"y" * (limits.max_body_bytes - _SPARE_BYTES)
    return request(_with_field(b"1").replace(b'"x":1', b'"prompt_cache_key":["%b"]' % text))


def admin(path: bytes, body: bytes) -> bytes:
    """A request to the admin port, which answers its own name only."""
    return request(body, path, b"content-type: application/json").replace(b"host: bench", b"host: localhost", 1)


def pipelined(size_bytes: int) -> bytes:
    """Many requests that need no key, together."""
    one = b"GET /livez HTTP/1.1\r\nhost: b\r\n\r\n"
    return one * (size_bytes // len(one))


def upload_start(announced_bytes: int, sent_bytes: int) -> bytes:
    """An upload that names its model, and rests after some bytes."""
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nfine\r\n--b\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    head = unfinished(announced_bytes, 0, b"/v1/audio/transcriptions", b"POST", _FORM)
    return head + form + b"\0" * (sent_bytes - len(form))


def embeddings(model: str, texts: Sequence[str]) -> bytes:
    return request(orjson.dumps({"model": model, "input": list(texts)}), b"/v1/embeddings")
