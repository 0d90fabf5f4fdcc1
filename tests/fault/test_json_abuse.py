"""JSON bodies made to hurt or to fool: refused quickly, and what is accepted reaches the backend byte by byte."""

import json
import time

import orjson
import pytest

from gateway.config import ServerConfig
from gateway.core.request import Kind
from tests.clients import Answer, Client, chat, request
from tests.fault.rig import running
from tests.routes import ROUTES
from tests.scripted import ScriptedBackend

START, END = b'{"model":"scripted","messages":[{"role":"user","content":"hi"}],"x":', b"}"
LARGE_BYTES = ServerConfig().max_body_bytes // 2
MAX_CPU_SECONDS = 1.0  # 16 MiB take about a tenth of it; parsing a bomb, or anything quadratic, many times as long


def inside(value: bytes) -> bytes:
    """A chat request with a field of this value."""
    return START + value + END


NOT_JSON = {
    "nothing": b"",
    "spaces": b"   ",
    "NaN": inside(b"NaN"),
    "-NaN": inside(b"-NaN"),
    "Infinity": inside(b"Infinity"),
    "-Infinity": inside(b"-Infinity"),
    "trailing comma": inside(b"[1,]"),
    "two commas": inside(b"[1,,2]"),
    "single quotes": inside(b"'a'"),
    "no quotes": inside(b"a"),
    "comment": inside(b"/* */ 1"),
    "line comment": inside(b"1 //"),
    "leading zero": inside(b"01"),
    "plus": inside(b"+1"),
    "lonely minus": inside(b"-"),
    "no fraction": inside(b"1."),
    "no integer": inside(b".5"),
    "no exponent": inside(b"1e"),
    "hex": inside(b"0x1"),
    "True": inside(b"True"),
    "lone surrogate": inside(b'"\\ud800"'),
    "reversed surrogates": inside(b'"\\udc00\\ud800"'),
    "raw surrogate": inside(b'"\xed\xa0\x80"'),
    "overlong UTF-8": inside(b'"\xc0\xaf"'),
    "bad UTF-8": inside(b'"\xff"'),
    "cut UTF-8": inside(b'"\xe2\x82"'),
    "Latin-1": inside(b'"\xe9"'),
    "NUL in a string": inside(b'"\0"'),
    "newline in a string": inside(b'"\n"'),
    "tab in a string": inside(b'"\t"'),
    "bad escape": inside(b'"\\x41"'),
    "short escape": inside(b'"\\u00"'),
    "open string": inside(b'"'),
    "open array": inside(b"["),
    "open object": inside(b"{"),
    "closed twice": inside(b"1") + b"}",
    "two documents": inside(b"1") * 2,
    "a value after": inside(b"1") + b" 1",
    "mismatched": inside(b"[}"),
    "no colon": inside(b'{"a" 1}'),
    "key without quotes": inside(b"{a:1}"),
    "number key": inside(b"{1:1}"),
    "BOM": b"\xef\xbb\xbf" + inside(b"1"),
    "UTF-16": inside(b"1").decode().encode("utf-16"),
    "UTF-32": inside(b"1").decode().encode("utf-32"),
    "form feed": inside(b"\x0c1"),
    "a string": b'"abc"',
    "a number": b"5",
    "null": b"null",
    "true": b"true",
    "an array": b"[" + inside(b"1") + b"]",
    "XML": b"<a/>",
    "form": b"model=scripted&x=1",
    "5,000 digits": inside(b"1" * 5000),
    "a number beyond double": inside(b"1e400"),
}

TWICE = {
    "model": b'{"model":"a","model":"scripted","messages":[]}',
    "model, escaped": b'{"model":"scripted","mod\\u0065l":"b","messages":[]}',
    "model, all escaped": b'{"model":"scripted","\\u006d\\u006f\\u0064\\u0065\\u006c":"b","messages":[]}',
    "model, escaped first": b'{"mod\\u0065l":"b","model":"scripted","messages":[]}',
    "stream": b'{"model":"scripted","messages":[],"stream":false,"stream":true}',
    "n": b'{"model":"scripted","messages":[],"n":1,"n":1000}',
    "n, escaped": b'{"model":"scripted","messages":[],"n":1,"\\u006e":1000}',
    "cache_salt": b'{"model":"scripted","messages":[],"cache_salt":"a","cache\\u005fsalt":"b"}',
    "max_tokens, hidden by a nested one": b'{"model":"scripted","messages":[],"max_tokens":1,'
    b'"x":{"max_tokens":2},"max_tokens":3}',
    "messages": b'{"model":"scripted","messages":[],"messages":[{"role":"user","content":"x"}]}',
}


@pytest.mark.parametrize("cases", [NOT_JSON, TWICE])
async def test_what_is_not_json_is_400_in_openais_shape_and_keeps_the_connection(
    backend: ScriptedBackend, cases: dict[str, bytes]
) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        for name, body in cases.items():
            await client.send(request(body))
            answer = await client.answer()
            assert answer.status == 400, (name, answer)
            assert answer.error["type"] == "invalid_request_error", name
        assert backend.ledger == []


ODD_BUT_JSON = [
    b"  \t\r\n" + inside(b"1") + b"  \n",
    inside(b"1E+2"),
    inside(b"-0"),
    inside(b"-0.0e-5"),
    inside(b"18446744073709551615"),
    inside(b"123456789012345678901234567890"),
    inside(b"0.1000000000000000055511151231257827"),
    inside(b'"\\u0000"'),
    inside(b'"\\ud83d\\ude00"'),
    inside('"\U0001f600 \u202e"'.encode()),
    inside(b'"\x7f"'.replace(b"\x7f", b"\xc2\x80")),
    inside(b'{"a":1,"a":2}'),
    inside(b'{"":1}'),
    inside(b"[[[[[[]]]]]]"),
    inside(b'"model"'),
    inside(b'["model","model"]'),
    inside(b'{"model":"other"}'),
    inside(b'"\\"model\\":"'),
    inside(b'"\\\\"'),
    inside(b'"\\\\\\""'),
    inside(b'"%b"' % (b'\\"' * 200_000)),
    inside(b'"data: [DONE]"'),
    inside(b'"\\u006dodel"'),
    inside(b"1").replace(b"hi", b"\xe4\xbd\xa0\xe5\xa5\xbd"),
    inside(b"[" * 60 + b"]" * 60),
]


async def test_odd_but_valid_json_reaches_the_backend_byte_by_byte(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        for body in ODD_BUT_JSON:
            json.loads(body)
            await client.send(request(body))
            assert (await client.answer()).status == 200, body
            assert backend.ledger[-1].body == body


@pytest.mark.parametrize("extra", [b"", b',"stream_options":null', b',"y":{"stream_options":1},"stream_options":null'])
async def test_asking_for_usage_changes_nothing_else_of_a_body(backend: ScriptedBackend, extra: bytes) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        for body in ODD_BUT_JSON:
            streamed = body.rstrip().removesuffix(b"}") + b',"stream":true' + extra + b"}"
            await client.send(request(streamed))
            assert (await client.answer()).status in (200, 502)
            seen = json.loads(backend.ledger[-1].body)
            expected = json.loads(streamed)
            assert seen == {**expected, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "field", [b'"model":5', b'"model":["scripted"]', b'"model":"' + b"x" * 2000 + b'"', b'"stream":"yes"',
              b'"stream":1', b'"n":0', b'"n":-1', b'"n":1.5', b'"n":"2"', b'"n":1000000', b'"n":99999999999999999999',
              b'"max_tokens":-1', b'"max_tokens":"many"', b'"cache_salt":5', b'"api_base":"http://evil"',
              b'"base_url":"http://evil"', b'"api_key":"x"', b'"extra_headers":{}', b'"user_config":{}',
              b'"prompt_embeds":"x"', b'"best_of":1000000'],
)  # fmt: skip
async def test_fields_of_wrong_kinds_and_fields_that_are_not_accepted_are_4xx(
    backend: ScriptedBackend, field: bytes
) -> None:
    async with running(backend) as under_test:
        document = b'{"messages":[{"role":"user","content":"x"}],' + field
        document += b"}" if field.startswith(b'"model"') else b',"model":"scripted"}'
        answer = await under_test.ask(document)
        assert answer.status in (400, 404)
        assert answer.error["type"] == "invalid_request_error"
        assert backend.ledger == []


LIMITS = {"server": {"max_json_strings": 65_536, "max_json_containers": 16_384, "max_json_values": 262_144}}
BOMBS = {
    "objects": b"[" + b'{"a":{}},' * (LARGE_BYTES // 9) + b"1]",
    "arrays": b"[" + b"[]," * (LARGE_BYTES // 3) + b"1]",
    "nested arrays": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "open arrays": b"[" * LARGE_BYTES,
    "open arrays, a few": b"[" * 30_000,
    "keys": b"{" + b",".join(b'"k%d":1' % n for n in range(LARGE_BYTES // 16)) + b"}",
    "values": b"[{}," + b"1," * (LARGE_BYTES // 2) + b"1]",
    "quotes": b'"' * LARGE_BYTES,
    "escaped quotes": b'"' + b'\\"' * (LARGE_BYTES // 2),
    "backslashes": b'"' + b"\\" * (LARGE_BYTES | 1) + b'"',
    "escapes": b'"' + b"\\u006d" * (LARGE_BYTES // 6) + b'\\x"',
    "short strings": b"[" + b'"",' * 1_000_000 + b'""]',
    "empty keys": b"{" + b'"":1,' * 1_000_000 + b'"":1}',
    "a long number": b"1" * LARGE_BYTES,
    "long numbers": b"[" + (b"9" * 400 + b",") * (LARGE_BYTES // 401) + b"1]",
    "spaces, then nothing": b" " * LARGE_BYTES,
    "brackets out of step": b"[" + b"[}" * 16_000 + b"]",
    "brackets just within the limit, open": b"[]" * 16_000 + b"[" * 700,
}


async def cpu_seconds_of(client: Client, body: bytes) -> tuple[Answer, float]:
    """The answer to a body, and the CPU time of this thread from its last byte on: clocks run on for others, too."""
    await client.send(request(body)[:-1])
    started = time.thread_time()
    await client.send(body[-1:])
    answer = await client.answer(30)
    return answer, time.thread_time() - started


@pytest.mark.parametrize("name", BOMBS)
async def test_a_json_bomb_is_400_and_holds_up_nobody_for_long(backend: ScriptedBackend, name: str) -> None:
    async with running(backend, sections=LIMITS) as under_test, await under_test.client() as client:
        answer, seconds = await cpu_seconds_of(client, inside(BOMBS[name]))
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
        assert seconds < MAX_CPU_SECONDS
    assert backend.ledger == []


HEAVY = {
    "one long string": START + b'"' + b"x" * LARGE_BYTES + b'"' + END,
    "a long prompt": chat("words and words " * (LARGE_BYTES // 16)),
    "token ids": b'{"model":"scripted","prompt":[' + b",".join([b"12345"] * 250_000) + b"]}",
    "digits": b'{"model":"scripted","prompt":[' + b"1," * (LARGE_BYTES - 100) + b"1]}",
    "numbers": START + b"[" + b"0.123456789," * (2 * LARGE_BYTES // 12 - 100) + b"1]" + END,
    "many messages": orjson.dumps(
        {"model": "scripted", "messages": [{"role": "user", "content": f"message {n}"} for n in range(10_000)]}
    ),
    "the same key nested often": START + b"[" + b",".join([b'{"model":1,"messages":2}'] * 15_000) + b"]" + END,
}


@pytest.mark.parametrize("name", HEAVY)
async def test_a_large_but_honest_body_holds_up_nobody_for_long(backend: ScriptedBackend, name: str) -> None:
    async with running(backend) as under_test, await under_test.client() as client:
        answer, seconds = await cpu_seconds_of(client, HEAVY[name])
        assert answer.status == 200
        assert seconds < MAX_CPU_SECONDS


async def test_a_body_of_just_the_limit_passes_and_one_byte_more_does_not(backend: ScriptedBackend) -> None:
    limit = 100_000
    async with running(backend, sections={"server": {"max_body_bytes": limit}}) as under_test:
        fits = START + b'"' + b"x" * (limit - len(START) - 3) + b'"' + END
        assert len(fits) == limit
        assert (await under_test.ask(fits)).status == 200
        assert (await under_test.ask(fits.replace(b"xx", b"xxx", 1))).status == 413
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        async with await under_test.client() as client:
            await client.send(head + b"%x\r\n%b\r\n1\r\n \r\n0\r\n\r\n" % (limit, fits))
            assert (await client.answer()).status == 413
            await client.end(4.0)


async def test_a_byte_order_mark_is_refused_on_every_route_that_reads_json(backend: ScriptedBackend) -> None:
    """As by vLLM; a body that no route of the gateway reads as JSON is refused for another reason."""
    async with running(backend) as under_test:
        for (method, target), route in ROUTES.items():
            if method == b"POST":
                answer = await under_test.ask(b"\xef\xbb\xbf" + chat(), target=target)
                reads_json = not route.local and route.kind is not Kind.UPLOAD
                assert answer.status == 400 if reads_json else answer.status >= 400, target
                assert answer.json.get("type") == ("error" if route.anthropic else None)
                assert (b"byte order mark" in answer.body) == reads_json, target
        assert backend.ledger == []
