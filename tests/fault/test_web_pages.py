"""Web pages that call the API, and clients behind proxies, on real sockets."""

import asyncio

from tests.clients import Answer, chat
from tests.fault.rig import UnderTest, holds, running
from tests.fault.test_embedding_batches import BAD, PATH, Embeds, body
from tests.scripted import ScriptedBackend
from tests.scripts import until

ORIGIN = b"origin: https://chat.example.com"
ADDRESSES = ("127.0.0.1", "203.0.113.9", "192.0.2.7", "10.0.0.9")
SECTIONS = {
    "server": {"cors_origins": ["https://chat.example.com"]},
    "auth": {"keys": [{"name": "page", "key": "sk-page", "requests_per_minute": 100}]},
}


async def preflight(under_test: UnderTest, target: bytes = b"/v1/chat/completions", *headers: bytes) -> Answer:
    return await under_test.ask(b"", *headers, method=b"OPTIONS", target=target)


async def test_a_page_may_ask_and_read_also_what_is_refused(backend: ScriptedBackend) -> None:
    async with running(backend, sections=SECTIONS) as under_test:
        for target in (b"/v1/chat/completions", b"/v1/models/x"):
            answer = await preflight(under_test, target, ORIGIN)
            assert answer.status == 204
            assert answer.header("access-control-allow-origin") == "https://chat.example.com"
            assert "authorization" in str(answer.header("access-control-allow-headers"))
        answers = [await under_test.ask(chat(), ORIGIN, *key) for key in ((b"authorization: Bearer sk-page",), ())]
        assert [answer.status for answer in answers] == [200, 401]
        for answer in answers:
            assert answer.header("access-control-allow-origin") == "https://chat.example.com"
        assert answers[0].header("x-ratelimit-limit-requests") == "100"


async def test_another_page_may_not(backend: ScriptedBackend) -> None:
    async with running(backend, sections=SECTIONS) as under_test:
        answer = await preflight(under_test, b"/v1/chat/completions", b"origin: https://evil.example")
        assert answer.header("access-control-allow-origin") is None


async def test_without_origins_there_is_no_preflight(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        answer = await preflight(under_test, b"/v1/chat/completions", ORIGIN)
        assert answer.status == 405
        assert answer.header("vary") is None


async def test_clients_behind_proxies_are_told_apart_by_the_address_that_the_last_trusted_one_saw(
    backend: ScriptedBackend,
) -> None:
    release = asyncio.Event()
    backend.plays(until(release), Embeds())
    trusted = {"trusted_proxies": ["127.0.0.1", "10.0.0.0/8"]}
    sections = {"server": trusted, "embeddings": {"max_delay_seconds": 30}}
    lines = b"x-forwarded-for: 203.0.113.9", b"x-forwarded-for: 192.0.2.7", b"x-forwarded-for: 10.0.0.9"
    async with running(backend, sections=sections) as under_test:
        backlog, asking = under_test.gateway.core.queue.backlog, list[asyncio.Task[Answer]]()
        async with asyncio.TaskGroup() as group:

            async def ask(text: str, *given: bytes) -> None:
                asking.append(group.create_task(under_test.ask(body(text), *given, target=PATH)))
                await holds(lambda: len(backend.ledger) + backlog.requests == len(asking), "it is sent or waits")

            while backlog.requests < 3:
                await ask(f"text {len(asking)}")
            await ask(BAD, *lines)
            release.set()
        answers = [each.result() for each in asking]
        assert [answer.status for answer in answers] == [200] * (len(asking) - 1) + [400]
        quarantine, now = (
            under_test.gateway.features["embeddings"].coalescer._quarantine,
            under_test.gateway.core.clock(),
        )
        found = [address for address in ADDRESSES if quarantine.has(f"address {address}", now)]
        assert found == ["192.0.2.7"]
