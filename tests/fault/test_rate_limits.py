"""Keys with limits: what they may use, what they are told, and that everything is given back."""

import asyncio
import re
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncOpenAI

from tests.clients import chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import answer as answered
from tests.scripts import fin, hang, json_answer, raw, stream, tokens, until, whole

SECRET = "sk-limited"
AS_CLIENT = b"authorization: Bearer sk-limited"
STREAM = chat(stream=True, max_tokens=20)


def limited(**limits: Any) -> dict[str, Any]:
    return {"auth": {"keys": [{"name": "limited", "key": SECRET, **limits}, {"name": "free", "key": "sk-free"}]}}


def left(under_test: UnderTest) -> str:
    return repr(under_test.gateway.core.ledger.limits["limited"])


async def test_requests_a_minute_are_limited_and_every_answer_tells_where_the_key_stands(
    backend: ScriptedBackend,
) -> None:
    async with running(backend, sections=limited(requests_per_minute=3)) as under_test:
        seen = [await under_test.ask(chat(), AS_CLIENT) for _ in range(4)]
        assert [answer.status for answer in seen] == [200, 200, 200, 429]
        assert [answer.header("x-ratelimit-remaining-requests") for answer in seen] == ["2", "1", "0", "0"]
        assert {answer.header("x-ratelimit-limit-requests") for answer in seen} == {"3"}
        refused = seen[-1]
        assert (refused.error["type"], refused.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "3 requests per minute" in refused.error["message"]
        assert 15_000 < int(refused.header("retry-after-ms") or 0) <= 20_000
        assert refused.header("x-should-retry") is None
        assert len(backend.ledger) == 3
        malformed = await under_test.ask(b"{", AS_CLIENT)
        assert (malformed.status, malformed.header("x-ratelimit-limit-requests")) == (400, "3")
        assert malformed.header("x-should-retry") == "false"
        free = await under_test.ask(chat(), b"authorization: Bearer sk-free")
        assert (free.status, free.header("x-ratelimit-limit-requests")) == (200, None)
        listing = await under_test.ask(b"", AS_CLIENT, method=b"GET", target=b"/v1/models")
        assert listing.status == 200  # look-ups that the gateway answers itself are not counted
        assert under_test.outcomes == {"completed": 5, "rate_limited": 1, "rejected": 1}


async def test_tokens_a_minute_are_those_that_usage_reports(backend: ScriptedBackend) -> None:
    backend.plays(*stream(3))
    async with running(backend, sections=limited(tokens_per_minute=100)) as under_test:
        answer = await under_test.ask(STREAM, AS_CLIENT)
        assert answer.is_done
        assert answer.header("x-ratelimit-limit-tokens") == "100"
        # Usage says 5 + 3; every 0.6 s, one comes back.
        assert re.fullmatch(r"<KeyLimits 0 running, 9[2-9]/100>", left(under_test))
        too_large = await under_test.ask(chat("word " * 500), AS_CLIENT)
        assert (too_large.status, too_large.header("x-should-retry")) == (429, "false")
        assert too_large.header("retry-after-ms") is None


@pytest.mark.parametrize(
    ("steps", "status", "remaining"),
    [
        ([fin()], 502, "1000/1000"),  # nothing was served
        ([raw(whole(400, b'{"error":{"message":"bad"}}'))], 400, "1000/1000"),
        ([*tokens(3), fin()], 200, "99[0-6]/1000"),  # the prompt, and what came of the expected 20
    ],
    ids=["dies", "refuses", "breaks off"],
)
async def test_what_was_not_used_is_given_back(
    backend: ScriptedBackend, steps: list[Any], status: int, remaining: str
) -> None:
    backend.plays(*steps)
    sections = {**limited(tokens_per_minute=1000), "admission": {"hold_without_backend": False}}
    async with running(backend, sections=sections) as under_test:
        assert (await under_test.ask(STREAM, AS_CLIENT)).status == status
        assert re.fullmatch(f"<KeyLimits 0 running, {remaining}>", left(under_test)), left(under_test)


async def test_requests_at_once_are_limited_and_clients_that_leave_give_theirs_back(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    sections = limited(max_concurrent_requests=3, requests_per_minute=100)
    async with running(backend, sections=sections, per_backend={"max_in_flight": 1}) as under_test:
        asked = [asyncio.create_task(under_test.ask(STREAM, AS_CLIENT)) for _ in range(3)]
        await holds(lambda: under_test.gateway.core.lease_broker.waiting == 2, "one runs, two wait")
        refused = await under_test.ask(STREAM, AS_CLIENT)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await holds(lambda: left(under_test).startswith("<KeyLimits 0 running"), lambda: left(under_test))
        await holds(lambda: under_test.in_flight == 0, "all is given back")
        backend.plays(*stream(1))
        assert (await under_test.ask(STREAM, AS_CLIENT)).is_done
        assert "98/100" in left(under_test)  # two of the four never reached a backend


EMBEDDINGS, RERANK, AUDIO = b"/v1/embeddings", b"/v1/rerank", b"/v1/audio/transcriptions"
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nscripted\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.mp3"\r\n\r\n%b\r\n--b--\r\n'
)
AS_FORM = b"content-type: multipart/form-data; boundary=b"


def pooled(**fields: Any) -> bytes:
    return orjson.dumps({"model": MODEL, **fields})


LARGE: dict[str, tuple[bytes, bytes, tuple[bytes, ...]]] = {
    "embeddings": (EMBEDDINGS, pooled(input="x" * 2400), ()),
    "embeddings that are not understood": (EMBEDDINGS, pooled(input="x" * 2400, unheard_of=1), ()),
    "rerank": (RERANK, pooled(query="x" * 240, documents=["d"] * 10), ()),
    "rerank that is not understood": (RERANK, pooled(query="x" * 240, documents=["d"] * 10, unheard_of=1), ()),
    "score": (b"/v1/score", pooled(text_1=["x" * 240], text_2=["d"] * 10), ()),
    "an upload": (AUDIO, FORM % (b"x" * 38_400), (AS_FORM,)),
}


@pytest.mark.parametrize(("target", "body", "headers"), LARGE.values(), ids=LARGE)
async def test_a_burst_of_work_that_generates_nothing_is_charged_before_it_is_answered(
    backend: ScriptedBackend, target: bytes, body: bytes, headers: tuple[bytes, ...]
) -> None:
    backend.plays(hang())
    async with running(backend, sections=limited(tokens_per_minute=1000)) as under_test:
        first = asyncio.create_task(under_test.ask(body, AS_CLIENT, *headers, target=target))
        await holds(lambda: bool(backend.ledger) and backend.ledger[0].whole, "it is at the backend")
        refused = await under_test.ask(body, AS_CLIENT, *headers, target=target)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert refused.header("retry-after-ms") is not None
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await holds(lambda: left(under_test).startswith("<KeyLimits 0 running"), lambda: left(under_test))
        level = re.fullmatch(r"<KeyLimits 0 running, (\d+)/1000>", left(under_test))
        assert level is not None
        assert 300 < int(level[1]) < 450  # what was sent is charged, though its client has left
        assert len(backend.ledger) == 1


async def test_an_upload_whose_usage_tells_no_tokens_is_charged_by_its_size(backend: ScriptedBackend) -> None:
    backend.plays(*answered(200, {"text": "t", "usage": {"type": "duration", "seconds": 9}}))
    form = FORM % (b"x" * 25_600)
    async with running(backend, sections=limited(tokens_per_minute=1000)) as under_test:
        assert (await under_test.ask(form, AS_CLIENT, AS_FORM, target=AUDIO)).status == 200
        assert re.search(r" 59\d/1000", left(under_test)), left(under_test)
        client = await under_test.client()
        head = b"POST %b HTTP/1.1\r\nhost: a\r\n%b\r\n%b\r\ntransfer-encoding: chunked\r\n\r\n"
        under_test.gateway.core.ledger.limits["limited"]._buckets["tokens"]._level = 1000.0
        await client.send(head % (AUDIO, AS_CLIENT, AS_FORM), b"%x\r\n%b\r\n0\r\n\r\n" % (len(form), form))
        assert (await client.answer()).status == 200
        client.close()
        await holds(lambda: " 59" in left(under_test), lambda: left(under_test))


@pytest.mark.parametrize("tokens", [10**12, 1 << 62, -(10**12), -1])
async def test_one_absurd_usage_costs_a_key_a_minute_at_most_and_gives_it_nothing(
    backend: ScriptedBackend, tokens: int
) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
    backend.plays(*answered(200, {"object": "chat.completion", "choices": [], "usage": usage}))
    async with running(backend, sections=limited(tokens_per_minute=1000)) as under_test:
        assert (await under_test.ask(chat(max_tokens=100), AS_CLIENT)).status == 200
        level = re.fullmatch(r"<KeyLimits 0 running, (-?\d+)/1000>", left(under_test))
        assert level is not None
        assert -200 < int(level[1]) <= 1000


async def test_a_stream_that_is_given_up_costs_what_came_and_another_answer_what_was_expected(
    backend: ScriptedBackend,
) -> None:
    backend.plays(hang())
    async with running(backend, sections=limited(tokens_per_minute=1000)) as under_test:
        for number, (body, costs) in enumerate([(STREAM, 1), (chat(max_tokens=100), 100)]):
            before = int(left(under_test).split()[-1].split("/")[0])
            client = await under_test.client()
            await client.send(request(body, AS_CLIENT))
            await holds(lambda seen=number: len(backend.ledger) > seen, "it is at the backend")
            client.close()
            await holds(lambda: left(under_test).startswith("<KeyLimits 0 running"), lambda: left(under_test))
            after = int(left(under_test).split()[-1].split("/")[0])
            assert costs <= before - after <= costs + 12


async def test_openais_sdk_waits_as_long_as_it_is_told_and_reads_the_headers(backend: ScriptedBackend) -> None:
    go = asyncio.Event()
    backend.plays_once(until(go), *json_answer())
    messages: Any = [{"role": "user", "content": "Hello."}]
    async with running(backend, sections=limited(max_concurrent_requests=1, requests_per_minute=60)) as under_test:
        url = f"http://127.0.0.1:{under_test.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key=SECRET, max_retries=0) as sdk:
            first = asyncio.create_task(sdk.chat.completions.create(model=MODEL, messages=messages))
            await holds(lambda: len(backend.ledger) == 1, "one runs")
            with pytest.raises(openai.RateLimitError) as raised:
                await sdk.chat.completions.create(model=MODEL, messages=messages)
            assert raised.value.code == "rate_limit_exceeded"
            asyncio.get_running_loop().call_later(0.2, go.set)
            patient = sdk.with_options(max_retries=2)
            answer = await patient.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
            assert answer.headers["x-ratelimit-limit-requests"] == "60"
            assert answer.retries_taken == 1
            await first
