"""Requests that are not what HTTP/1.1 allows: a 4xx, the connection closed, and nothing of them at the backend."""

import asyncio
import time

import pytest

from tests.clients import Answer, EndOfConnection, chat, request
from tests.fault.rig import LoopLag, UnderTest, running
from tests.scripted import ScriptedBackend
from tests.scripts import json_answer

BODY = chat()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
VALID = POST + LENGTH + b"\r\n" + BODY
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)

REFUSED = {
    "no host": b"POST /v1/chat/completions HTTP/1.1\r\n" + LENGTH + b"\r\n" + BODY,
    "two hosts": POST + b"host: b\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/2.0": VALID.replace(b"HTTP/1.1", b"HTTP/2.0"),
    "HTTP/0.9": VALID.replace(b"HTTP/1.1", b"HTTP/0.9"),
    "HTTP/1.2": VALID.replace(b"HTTP/1.1", b"HTTP/1.2"),
    "no version": b"GET /v1/models\r\nhost: a\r\n\r\n",
    "lower-case http": VALID.replace(b"HTTP/1.1", b"http/1.1"),
    "method in lower case": VALID.replace(b"POST", b"post"),
    "method of garbage": VALID.replace(b"POST", b"P@ST"),
    "method unknown": VALID.replace(b"POST", b"FROB"),
    "absolute target with a user": VALID.replace(b"/v1", b"http://u:p@a/v1"),
    "absolute target without a host": VALID.replace(b"/v1", b"http:///v1"),
    "absolute target of another scheme": VALID.replace(b"/v1", b"ftp://a/v1"),
    "target without slash": VALID.replace(b"/v1", b"v1"),
    "asterisk": VALID.replace(b"/v1/chat/completions", b"*"),
    "fragment": VALID.replace(b"completions ", b"completions#x "),
    "space in the target": VALID.replace(b"completions ", b"completions x "),
    "control byte in the target": VALID.replace(b"completions ", b"completions\x01 "),
    "NUL in the target": VALID.replace(b"completions ", b"completions\0 "),
    "byte over 127 in the target": VALID.replace(b"completions ", b"completions\xff "),
    "CONNECT": b"CONNECT evil:443 HTTP/1.1\r\nhost: evil:443\r\n\r\n",
    "TRACE": b"TRACE /v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
    "OPTIONS": b"OPTIONS /v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
    "header without colon": POST + b"nonsense\r\n" + LENGTH + b"\r\n" + BODY,
    "header without name": POST + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "space before the colon": POST + b"content-length : %d\r\n\r\n" % len(BODY) + BODY,
    "tab before the colon": POST + b"content-length\t: %d\r\n\r\n" % len(BODY) + BODY,
    "space in a name": POST + b"x y: z\r\n" + LENGTH + b"\r\n" + BODY,
    "control byte in a name": POST + b"x\x01y: z\r\n" + LENGTH + b"\r\n" + BODY,
    "byte over 127 in a name": POST + b"x\xffy: z\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in a value": POST + b"x: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "bare CR in a value": POST + b"x: a\rb\r\n" + LENGTH + b"\r\n" + BODY,
    "folded header": POST + b"x: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "folded first header": b"POST /v1/chat/completions HTTP/1.1\r\n host: a\r\n" + LENGTH + b"\r\n" + BODY,
    "bare LF after a header": POST + b"x: a\n" + LENGTH + b"\r\n" + BODY,
    "bare LF after the request line": VALID.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"),
    "bare CR after the request line": VALID.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r"),
    "129 headers": POST + b"".join(b"x%d: y\r\n" % n for n in range(129)) + LENGTH + b"\r\n" + BODY,
    "a header of 8,191 bytes": POST + b"x: " + b"y" * 8191 + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "a name of 8,191 bytes": POST + b"y" * 8191 + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "a target of 8,191 bytes": VALID.replace(b"completions ", b"completions?" + b"x" * 8191 + b" "),
    "a head without end": POST + b"x: " + b"y" * 200_000,
    "headers without end": POST + b"x: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 5000,
    "length with an underscore": POST + b"content_length: 3\r\n" + LENGTH + b"\r\n" + BODY,
    "framing with an underscore": POST + b"transfer_encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "length and chunked": POST + LENGTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNK + b"0\r\n\r\n",
    "chunked and length": CHUNKED + LENGTH + b"\r\n" + CHUNK + b"0\r\n\r\n",
    "two lengths": POST + LENGTH + b"content-length: 3\r\n\r\n" + BODY,
    "the same length twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": POST + b"content-length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
    "length with a sign": POST + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "negative length": POST + b"content-length: -1\r\n\r\n" + BODY,
    "length in hex": POST + b"content-length: 0x40\r\n\r\n" + BODY,
    "length with underscore": POST + b"content-length: 1_0\r\n\r\n" + BODY,
    "length of letters": POST + b"content-length: ten\r\n\r\n" + BODY,
    "empty length": POST + b"content-length: \r\n\r\n" + BODY,
    "length beyond 64 bit": POST + b"content-length: 18446744073709551617\r\n\r\n" + BODY,
    "length over the limit": POST + b"content-length: 33554433\r\n\r\n",
    "gzip, chunked": POST + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNK + b"0\r\n\r\n",
    "chunked, identity": POST + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNK + b"0\r\n\r\n",
    "identity": POST + b"transfer-encoding: identity\r\n" + LENGTH + b"\r\n" + BODY,
    "xchunked": POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNK + b"0\r\n\r\n",
    "chunked twice": CHUNKED + b"transfer-encoding: chunked\r\n\r\n" + CHUNK + b"0\r\n\r\n",
    "chunked in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"\r\n" + CHUNK + b"0\r\n\r\n",
    "chunk size of garbage": CHUNKED + b"\r\nzz\r\n" + BODY,
    "chunk size with 0x": CHUNKED + b"\r\n0x%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "chunk size with sign": CHUNKED + b"\r\n+%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "chunk size beyond 64 bit": CHUNKED + b"\r\nfffffffffffffffff\r\n" + BODY,
    "chunk larger than allowed": CHUNKED + b"\r\n3b9aca00\r\n" + b"x" * 40_000_000,
    "chunk without its end": CHUNKED + b"\r\n%x\r\n" % len(BODY) + BODY + b"xx0\r\n\r\n",
    "bare LF after a chunk size": CHUNKED + b"\r\n%x\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "space before a chunk size": CHUNKED + b"\r\n %x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "chunk extension with NUL": CHUNKED + b"\r\n%x;a=\0\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "chunk extension of 1 MiB": CHUNKED + b"\r\n%x;" % len(BODY) + b"a" * 1048576 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "trailers without end": CHUNKED + b"\r\n" + CHUNK + b"0\r\n" + b"x: yyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 20_000,
    "one trailer without end": CHUNKED + b"\r\n" + CHUNK + b"0\r\nx: " + b"y" * 2_000_000,
    "a million one-byte chunks": CHUNKED + b"\r\n" + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n",
    "a length in a trailer": CHUNKED + b"\r\n" + CHUNK + b"0\r\ncontent-length: 99\r\n\r\n",
    "a framing in a trailer": CHUNKED + b"\r\n" + CHUNK + b"0\r\ntransfer-encoding: chunked\r\n\r\n",
    "expecting something else": POST + b"expect: 200-ok\r\n" + LENGTH + b"\r\n" + BODY,
    "gzip": POST + b"content-encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY,
    "br": POST + b"content-encoding: br\r\n" + LENGTH + b"\r\n" + BODY,
    "zstd": POST + b"Content-Encoding: zstd\r\n" + LENGTH + b"\r\n" + BODY,
    "double gzip": POST + b"content-encoding: gzip, gzip\r\n" + LENGTH + b"\r\n" + BODY,
    "identity and gzip": POST + b"content-encoding: identity\r\ncontent-encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY,
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "garbage": bytes(range(256)) * 10,
    "NULs": b"\0" * 1000,
}


async def refusal(under_test: UnderTest, data: bytes, *cuts: int) -> Answer:
    """The answer to bytes that must be refused; afterwards the connection is closed."""
    async with await under_test.client() as client:
        sending = asyncio.create_task(
            client.send(*(data[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)), strict=True)))
        )
        answer = await client.answer()
        await client.end(4.0)
        await asyncio.gather(sending, return_exceptions=True)
        return answer


@pytest.mark.parametrize("name", REFUSED)
async def test_what_http_does_not_allow_is_refused_and_goes_nowhere(backend: ScriptedBackend, name: str) -> None:
    async with running(backend) as under_test:
        started = time.process_time()
        answer = await refusal(under_test, REFUSED[name])
        assert 400 <= answer.status < 500, answer
        assert answer.complete
        assert answer.error["type"] == "invalid_request_error"
        assert answer.header("connection") == "close"
        assert backend.ledger == []
        assert time.process_time() - started < 1.0


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"zstd", b"deflate", b"gzip, gzip", b"x", b"identity, gzip"])
async def test_compressed_bodies_are_415(backend: ScriptedBackend, encoding: bytes) -> None:
    async with running(backend) as under_test:
        answer = await refusal(under_test, POST + b"content-encoding: " + encoding + b"\r\n" + LENGTH + b"\r\n" + BODY)
        assert (answer.status, answer.error["code"]) == (415, "unsupported_content_encoding")


ACCEPTED = {
    "as usual": VALID,
    "chunked": CHUNKED + b"\r\n" + CHUNK + b"0\r\n\r\n",
    "chunk extensions": CHUNKED + b'\r\n%x;a=b;c="d"\r\n%b\r\n0;e\r\n\r\n' % (len(BODY), BODY),
    "many small chunks": CHUNKED + b"\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    "upper-case chunk size": CHUNKED + b"\r\n%X\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "Chunked in capitals": CHUNKED.replace(b"chunked", b"Chunked") + b"\r\n" + CHUNK + b"0\r\n\r\n",
    "absolute target": VALID.replace(b"/v1", b"http://a/v1"),
    "absolute target with a query": VALID.replace(b"/v1/chat/completions", b"HTTPS://a:1/v1/chat/completions?a=/b"),
    "absolute target elsewhere": VALID.replace(b"/v1", b"http://evil/v1"),
    "a query": VALID.replace(b"completions ", b"completions?a=b&c=%2e%2e ", 1),
    "128 headers": POST + b"".join(b"x%d: y\r\n" % n for n in range(126)) + LENGTH + b"\r\n" + BODY,
    "a header of 8,000 bytes": POST + b"x: " + b"y" * 8000 + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "empty header value": POST + b"x:\r\n" + LENGTH + b"\r\n" + BODY,
    "no space after the colon": VALID.replace(b"host: a", b"host:a"),
    "tab after the colon": VALID.replace(b"host: a", b"host:\ta"),
    "an empty line first": b"\r\n" + VALID,
    "content-encoding identity": POST + b"content-encoding: identity\r\n" + LENGTH + b"\r\n" + BODY,
    "connection: close": POST + b"connection: close\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/1.0": VALID.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/1.0 without host": VALID.replace(b"HTTP/1.1\r\nhost: a", b"HTTP/1.0"),
    "trailers": CHUNKED
    + b"trailer: x-request-id\r\n\r\n"
    + CHUNK
    + b"0\r\nx-request-id: smuggled\r\nhost: evil\r\ncontent-encoding: gzip\r\nauthorization: Bearer x\r\n"
    b"traceparent: smuggled\r\n\r\n",
    "a name with underscores": POST + b"x_y: z\r\n" + LENGTH + b"\r\n" + BODY,
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_what_http_allows_reaches_the_backend_in_plain_form(
    backend: ScriptedBackend, name: str, in_pieces: bool
) -> None:
    data = ACCEPTED[name]
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(*([bytes([byte]) for byte in data] if in_pieces else [data]))
        assert (await client.answer()).status == 200
        (seen,) = backend.ledger
        assert seen.body == BODY
        names = [name for name, _ in seen.headers]
        assert set(names) <= {
            b"host", b"accept-encoding", b"authorization", b"x-request-id", b"content-type", b"content-length",
        }  # fmt: skip
        assert seen.header(b"host") == backend.url.removeprefix("http://").encode()
        assert b"smuggled" not in seen.head


@pytest.mark.parametrize(
    "framing", [LENGTH + b"\r\n" + BODY, b"transfer-encoding: chunked\r\n\r\n" + CHUNK + b"0\r\n\r\n"]
)
async def test_a_request_that_offers_http_2_is_served_in_http_1(backend: ScriptedBackend, framing: bytes) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    for cut in (0, 150, len(POST + offer) + 60):
        async with running(backend) as under_test, await under_test.client() as client:
            data = POST + offer + framing
            await client.send(data[:cut], data[cut:], seconds_apart=0.01)
            assert (await client.answer()).status == 200
            assert backend.ledger[-1].body == BODY


async def test_what_follows_an_upgrade_is_not_taken_for_a_request(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(
            b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n" + VALID
        )
        assert (await client.answer()).status == 200
        await client.end()
        assert backend.ledger == []


async def test_a_refusal_comes_after_the_answers_before_it(backend: ScriptedBackend) -> None:
    backend.plays(*json_answer())
    async with running(backend) as under_test:
        for bad in (
            b"garbage\r\n\r\n",
            b"\0\0\0",
            b"GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n",
            b"POST / HTTP/1.1\r\n\r\n",
        ):
            async with await under_test.client() as client:
                await client.send(VALID + VALID + bad + VALID)
                statuses = [(await client.answer()).status for _ in range(3)]
                assert statuses[:2] == [200, 200]
                assert statuses[2] in (400, 404)
                await client.end()
        assert len(backend.ledger) == 8


async def test_garbage_after_an_upload_does_not_spoil_it(backend: ScriptedBackend) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nscripted\r\n--b--\r\n'
    data = request(form, b"content-type: multipart/form-data; boundary=b", target=b"/v1/audio/transcriptions")
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(data + b"\0\0garbage")
        assert (await client.answer()).status == 200
        assert backend.ledger[0].body == form


async def test_an_upload_in_tiny_chunks_holds_nobody_up(backend: ScriptedBackend) -> None:
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    data = head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 30_000
    async with running(backend) as under_test, LoopLag() as lag, await under_test.client() as client:
        try:
            for start in range(0, len(data), 20_000):
                await client.send(data[start : start + 20_000])
            await client.answer(0.5)
        except (EndOfConnection, TimeoutError):
            pass
        assert lag.longest_seconds < 0.25


async def test_an_upload_byte_by_byte_holds_nobody_up(backend: ScriptedBackend) -> None:
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(head + b"content-length: 900000\r\n\r\n" + b"content-disposition:" * 30_000)
        started = time.process_time()
        for _ in range(2000):
            await client.send(b"x")
            await asyncio.sleep(0)
        assert time.process_time() - started < 1.5


async def test_a_client_may_use_its_connection_for_many_requests(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        for data in ACCEPTED.values():
            if b"HTTP/1.0" in data or b"connection:" in data:
                continue
            await client.send(data)
            assert (await client.answer()).status == 200


@pytest.mark.parametrize("target", [b"/v1/chat/completions", b"/nowhere"])
async def test_the_answer_to_head_has_no_body(backend: ScriptedBackend, target: bytes) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(b"HEAD %b HTTP/1.1\r\nhost: a\r\n\r\n" % target)
        data = await client.read()
        assert data.startswith(b"HTTP/1.1 40")
        assert data.endswith(b"\r\n\r\n")
        with pytest.raises(EndOfConnection):
            await client.read()


@pytest.mark.parametrize("target", [b"/livez", b"/readyz", b"/v1/models"])
async def test_head_is_answered_like_get_without_the_body(backend: ScriptedBackend, target: bytes) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        body = (await under_test.ask(method=b"GET", target=target)).body
        for _ in range(2):  # on one connection
            await client.send(b"HEAD %b HTTP/1.1\r\nhost: a\r\n\r\n" % target)
            data = await client.read()
            assert data.startswith(b"HTTP/1.1 200 ")
            assert data.endswith(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % len(body) in data


async def test_options_checks_health_as_haproxy_does(backend: ScriptedBackend) -> None:
    async with running(backend, sections={"server": {"cors_origins": ["https://chat.example"]}}) as under_test:
        for target in (b"/livez", b"/readyz"):
            assert (await under_test.ask(method=b"OPTIONS", target=target)).status == 200
        async with await under_test.client() as client:  # without a Host header
            await client.send(b"OPTIONS /livez HTTP/1.0\r\n\r\n")
            assert (await client.read()).startswith(b"HTTP/1.1 200 ")


async def test_the_refusal_of_a_malformed_head_request_has_no_body(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(b"HEAD /livez HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 8191 + b"\r\n\r\n")
        data = await client.read()
        assert data.startswith(b"HTTP/1.1 431 ")
        assert data.endswith(b"\r\n\r\n")


async def test_http_1_0_gets_no_permission_to_go_on(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        await client.send(VALID.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: a", b"expect: 100-continue"))
        assert (await client.read()).startswith(b"HTTP/1.1 200 ")
