"""Heads of backends at the edge of HTTP: a 502 or a faithful answer, nothing injected, and the next request served."""

import tracemalloc

import pytest

from tests.clients import Answer, chat, request
from tests.fault.rig import running
from tests.scripted import ScriptedBackend
from tests.scripts import chunk, drained, fin, head, json_answer, last_chunk, raw

OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"content-type: application/json\r\n"
BODY = b'{"choices":[]}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
PLAIN = OK + JSON + LENGTH + b"\r\n" + BODY
CHUNKED = OK + JSON + b"transfer-encoding: chunked\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
INJECTED = b"HTTP/1.1 200 OK\r\nx-injected: 1\r\ncontent-length: 4\r\n\r\nEVIL"

REFUSED = {
    "folded header": OK + b"x: a\r\n b\r\n" + JSON + LENGTH + b"\r\n" + BODY,
    "folded content-type": OK + b"content-type: application/json;\r\n x=y\r\n" + LENGTH + b"\r\n" + BODY,
    "bare LF everywhere": (OK + JSON + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "bare LF in a header": OK + b"x: a\ny: b\r\n" + JSON + LENGTH + b"\r\n" + BODY,
    "bare CR for all ends": (OK + JSON + LENGTH + b"\r\n").replace(b"\r\n", b"\r") + BODY,
    "5,000 x 103": b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n" * 5000 + PLAIN,
    "the same length twice": OK + JSON + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": OK + JSON + b"content-length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
    "length with a sign": OK + JSON + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "chunked, then identity": OK + JSON + b"transfer-encoding: chunked, identity\r\n\r\n" + BODY,
    "status 99": OK.replace(b"200", b"099") + JSON + LENGTH + b"\r\n" + BODY,
    "status 2000": OK.replace(b"200", b"2000") + JSON + LENGTH + b"\r\n" + BODY,
}
FAITHFUL = {
    "100, then 200": (200, BODY, b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN),
    "102, then 200": (200, BODY, b"HTTP/1.1 102 Processing\r\n\r\n" + PLAIN),
    "100 with a length": (
        200,
        BODY,
        b"HTTP/1.1 100 Continue\r\ncontent-length: 5\r\n\r\n" + PLAIN,
    ),
    "204 with a body": (204, b"", b"HTTP/1.1 204 No Content\r\n" + LENGTH + b"\r\n" + BODY),
    "304 with a length": (304, b"", b"HTTP/1.1 304 Not Modified\r\n" + LENGTH + b"\r\n"),
    "two answers": (200, BODY, PLAIN + INJECTED),
    "more than its length": (200, BODY, PLAIN + b"x" * 100),
    "chunked twice": (
        200,
        b"",
        CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "gzip": (200, BODY, OK + JSON + b"content-encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY),
    "trailers": (200, BODY, CHUNKED + b"\r\n" + CHUNK + b"0\r\nx-injected: 1\r\n\r\n"),
    "chunk extension": (200, BODY, CHUNKED + b"\r\n" + CHUNK.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\n\r\n"),
    "status 600": (600, BODY, OK.replace(b"200", b"600") + JSON + LENGTH + b"\r\n" + BODY),
    "HTTP/1.0": (200, BODY, OK.replace(b"1.1", b"1.0") + JSON + LENGTH + b"\r\n" + BODY),
    "HTTP/2.0": (200, BODY, OK.replace(b"1.1", b"2.0") + JSON + LENGTH + b"\r\n" + BODY),
    "no reason": (200, BODY, b"HTTP/1.1 200\r\n" + JSON + LENGTH + b"\r\n" + BODY),
    "leading empty lines": (200, BODY, b"\r\n\r\n" + PLAIN),
}


async def answer_and_next(backend: ScriptedBackend, wire: bytes) -> Answer:
    """The answer to a request that got these bytes; the next one on the same connection is served as usual."""
    async with running(backend) as under_test, await under_test.client() as client:
        backend.plays_once(raw(wire), fin())
        backend.plays(*json_answer("fine"))
        await client.send(request(chat("odd")))
        answer = await client.answer()
        assert answer.complete
        assert b"injected" not in answer.head
        assert answer.header("link") is None
        await client.send(request(chat("next")))
        following = await client.answer()
        assert following.json["choices"][0]["message"]["content"] == "fine"
        return answer


@pytest.mark.parametrize("name", REFUSED)
async def test_a_head_that_others_might_read_differently_is_a_502(backend: ScriptedBackend, name: str) -> None:
    answer = await answer_and_next(backend, REFUSED[name])
    assert answer.status == 502
    assert answer.error["type"] == "upstream_error"


@pytest.mark.parametrize("name", FAITHFUL)
async def test_an_odd_head_that_has_one_meaning_is_answered_by_it(backend: ScriptedBackend, name: str) -> None:
    status, body, wire = FAITHFUL[name]
    answer = await answer_and_next(backend, wire)
    assert (answer.status, answer.body) == (status, body)


async def test_an_endless_plain_answer_passes_through_in_constant_memory(backend: ScriptedBackend) -> None:
    mebibytes = 64
    backend.plays(head(200, kind=b"application/json"), raw(b"%x\r\n" % (mebibytes << 20)),
                  drained(b"x" * 65536, mebibytes * 16), raw(b"\r\n"), chunk(b"end"), last_chunk())  # fmt: skip
    async with running(backend) as under_test:
        tracemalloc.start()
        try:
            async with await under_test.client() as client:
                await client.send(request(chat()))
                tail, size = b"", 0
                before = tracemalloc.get_traced_memory()[0]
                while not tail.endswith(b"0\r\n\r\n"):
                    data = await client.read(262144)
                    tail, size = tail[-8:] + data[-8:], size + len(data)
                held = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert size > mebibytes << 20
        assert held < 12 << 20, held
