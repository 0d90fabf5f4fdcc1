"""Answers that are not HTTP, or too large, or hostile: a 502 or a faithful copy, and nothing of them in our head."""

import tracemalloc

import pytest

from tests.clients import chat, request
from tests.fault.rig import running
from tests.scripted import ScriptedBackend
from tests.scripts import (
    DONE_EVENT,
    Step,
    chunk,
    drained,
    event,
    head,
    json_answer,
    last_chunk,
    pause,
    raw,
    stream,
    tokens,
    whole,
)

OK = b"HTTP/1.1 200 OK\r\n"
BODY = b'{"choices":[]}'
LENGTH = b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)

NOT_HTTP = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00 this is not HTTP\r\n\r\n",
    "bare CR in a value": OK + b"content-type: a\rb\r\n" + LENGTH,
    "NUL in a value": OK + b"content-type: a\0b\r\n" + LENGTH,
    "control byte in a value": OK + b"retry-after: a\x01b\r\n" + LENGTH,
    "space before the colon": OK + b"content-type : a\r\n" + LENGTH,
    "no colon": OK + b"content-type\r\n" + LENGTH,
    "both framings": OK + b"transfer-encoding: chunked\r\n" + LENGTH,
    "two lengths": OK + b"content-length: 3\r\n" + LENGTH,
    "negative length": OK + b"content-length: -1\r\n\r\n" + BODY,
    "length of letters": OK + b"content-length: ten\r\n\r\n" + BODY,
    "endless length": OK + b"content-length: " + b"9" * 40 + b"\r\n\r\n" + BODY,
    "bad chunk size": OK + b"transfer-encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "chunk too long": OK + b"transfer-encoding: chunked\r\n\r\n2\r\nabcdef\r\n0\r\n\r\n",
    "HTTP/3.7": b"HTTP/3.7 200 OK\r\n" + LENGTH,
    "no status": b"HTTP/1.1 OK\r\n" + LENGTH,
    "2,000 headers": OK + b"x: y\r\n" * 2000 + LENGTH,
    "head of 200 KiB": OK + b"x: " + b"y" * 204_800 + b"\r\n" + LENGTH,
    "endless head": OK + b"x: " + b"y" * 204_800,
    "1xx without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
    "switching protocols": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello",
}


@pytest.mark.parametrize("name", NOT_HTTP)
async def test_an_answer_that_is_not_http_is_a_502(backend: ScriptedBackend, name: str) -> None:
    backend.plays(raw(NOT_HTTP[name]))
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert (answer.status, answer.complete) == (502, True)
        assert answer.error["type"] == "upstream_error"
        assert set(dict(answer.headers)) <= {
            "x-request-id", "x-gateway-backend", "x-gateway-queue-ms", "x-gateway-prefix-tokens", "content-type",
            "content-length",
        }  # fmt: skip
        backend.plays(*json_answer("fine"))
        assert (await under_test.ask()).status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("set-cookie", "session=evil"), ("location", "http://169.254.169.254/"), ("alt-svc", 'h2="evil:443"'),
        ("access-control-allow-origin", "*"), ("access-control-allow-credentials", "true"), ("connection", "x-key"),
        ("proxy-authenticate", "Basic"), ("www-authenticate", "Basic"), ("upgrade", "h2c"), ("trailer", "x-key"),
        ("keep-alive", "timeout=1"), ("strict-transport-security", "max-age=1"), ("server", "uvicorn"),
        ("x-gateway-backend", "forged"), ("x-request-id", "forged"), ("date", "now"), ("refresh", "0;url=evil"),
    ],
)  # fmt: skip
async def test_headers_of_a_backend_that_are_not_for_clients_are_dropped(
    backend: ScriptedBackend, name: str, value: str
) -> None:
    line = f"{name}: {value}".encode()
    async with running(backend) as under_test:
        backend.plays_once(raw(whole(200, BODY, line)))
        backend.plays_once(head(200, line), *stream()[1:])
        for body in (chat(), chat(stream=True)):
            answer = await under_test.ask(body)
            assert answer.status == 200
            assert value not in [found for known, found in answer.headers if known == name]


async def test_headers_of_a_backend_that_help_clients_are_passed_on(backend: ScriptedBackend) -> None:
    backend.plays(raw(whole(429, b"{}", b"Retry-After: 7", b"openai-processing-ms: 12")))
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert (answer.status, answer.header("retry-after"), answer.header("openai-processing-ms")) == (429, "7", "12")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_never_followed(backend: ScriptedBackend, other: ScriptedBackend, status: int) -> None:
    backend.plays(raw(whole(status, b"", b"location: " + other.url.encode() + b"/v1/chat/completions")))
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert answer.status in (status, 502)
        assert answer.header("location") is None
        assert (len(backend.ledger), len(other.ledger)) == (1, 0)


async def test_informational_answers_are_passed_over(backend: ScriptedBackend) -> None:
    backend.plays(
        raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"), *json_answer("a")
    )
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert answer.status == 200
        assert answer.header("link") is None


async def test_answers_without_a_body_keep_the_connection_in_step(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        for status in (204, 304, 200):
            backend.plays_once(
                raw(b"HTTP/1.1 %d X\r\n%b\r\n" % (status, b"content-length: 0\r\n" if status == 200 else b""))
            )
            await client.send(request(chat()))
            assert (await client.answer()).status == status


@pytest.mark.parametrize("piece_bytes", [1, 3, 7])
async def test_an_answer_in_tiny_pieces_arrives_unchanged(backend: ScriptedBackend, piece_bytes: int) -> None:
    text = "naïve 你好 🚀 \u202e\u0000"
    body = event(text) + b": keep-alive\n\n" + event("b") + DONE_EVENT
    wire = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    wire += b"".join(b"1\r\n%b\r\n" % body[i : i + 1] for i in range(len(body))) + b"0\r\n\r\n"
    steps: list[Step] = []
    for start in range(0, len(wire), piece_bytes):
        steps += [raw(wire[start : start + piece_bytes]), pause(0)]
    backend.plays(*steps)
    async with running(backend) as under_test:
        answer = await under_test.ask(chat(stream=True))
        assert answer.body == body
        assert answer.is_done


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_either_kind_of_line_end_passes_and_hides_only_the_usage(
    backend: ScriptedBackend, newline: bytes
) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n'
    everything = (event("a") + event("b") + usage + DONE_EVENT).replace(b"\n", newline)
    for together in (True, False):
        pieces = [everything] if together else [part + newline * 2 for part in everything.split(newline * 2)[:-1]]
        steps = [step for piece in pieces for step in (chunk(piece), pause(0.005))]
        backend.plays(head(200), *steps, last_chunk())
        async with running(backend) as under_test:
            answer = await under_test.ask(chat(stream=True))
            assert answer.body == (event("a") + event("b") + DONE_EVENT).replace(b"\n", newline)
            under_test.gateway.core.finished.settle()
            assert under_test.gateway.core.metrics.completion_tokens.values == {("scripted",): 3}


async def test_long_headers_of_a_backend_go_no_further(backend: ScriptedBackend) -> None:
    long = b"x" * 60_000
    backend.plays(raw(whole(200, b"{}", b"retry-after: 3", kind=b"text/" + long)))
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert (answer.status, answer.header("retry-after"), answer.body) == (200, "3", b"{}")
        assert len(answer.head) < 1000


async def test_an_event_of_many_megabytes_is_not_held_back(backend: ScriptedBackend) -> None:
    size = 32 * 1048576
    backend.plays(head(200), raw(b"%x\r\n" % (size + 8) + b"data: "), drained(b"x" * 65536, size // 65536),
                  raw(b"\n\n\r\n"), chunk(DONE_EVENT), last_chunk())  # fmt: skip
    async with running(backend) as under_test:
        tracemalloc.start()
        try:
            async with await under_test.client() as client:
                await client.send(request(chat(stream=True)))
                tail = b""
                before = tracemalloc.get_traced_memory()[0]
                while not tail.endswith(b"0\r\n\r\n"):
                    tail = tail[-8:] + await client.read(262144)
                held = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert held < 12 * 1048576, held


async def test_prompts_and_tokens_in_every_script_arrive_byte_by_byte(backend: ScriptedBackend) -> None:
    text = "\U0001d56c é ﷽ \u202eabc\u202c 👩‍👩‍👧‍👦 \u0000\u001f \\u0000 </script> ' OR 1=1 -- {{7*7}} ��"
    backend.plays(*tokens(0), chunk(event(text)), chunk(DONE_EVENT), last_chunk())
    async with running(backend) as under_test:
        body = chat(text, stream=True, stream_options={"include_usage": True})
        answer = await under_test.ask(body)
        assert answer.body == event(text) + DONE_EVENT
        assert backend.ledger[-1].body == body


async def test_a_stream_without_any_event_is_a_whole_answer(backend: ScriptedBackend) -> None:
    backend.plays(head(200), last_chunk())
    async with running(backend) as under_test:
        answer = await under_test.ask(chat(stream=True, input="x"), target=b"/v1/responses")
        assert (answer.status, answer.body, answer.complete) == (200, b"", True)


async def test_a_plain_answer_in_small_chunks_is_not_piled_up(backend: ScriptedBackend) -> None:
    piece = b"".join(b"40\r\n%b\r\n" % (b"x" * 64) for _ in range(1000)) + b"1\r\ny\r\n"
    pieces = [step for _ in range(60) for step in (raw(piece), pause(0.001))]
    backend.plays(head(200, kind=b"application/json"), *pieces, last_chunk())
    async with running(backend) as under_test:
        answer = await under_test.ask()
        assert (answer.complete, len(answer.body)) == (True, 64_001 * 60)
        assert answer.header("transfer-encoding") == "chunked"  # it was passed on as it came
