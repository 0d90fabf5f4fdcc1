"""Requests at the edge of what HTTP allows: served or refused, and whatever follows on the connection stays in step."""

import asyncio

import pytest

from tests.clients import Answer, EndOfConnection, chat, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import echo

FIRST, SLOW, LAST = (request(chat(text)) for text in ("first", "slow", "last"))


async def answers(under_test: UnderTest, data: bytes, at_most: int = 4) -> list[Answer]:
    """What comes back until the connection ends or as many have come."""
    found: list[Answer] = []
    async with await under_test.client() as client:
        await client.send(data)
        try:
            while len(found) < at_most:
                found.append(await client.answer())
        except EndOfConnection:
            pass
    return found


def text_of(answer: Answer) -> str:
    """What the backend was asked."""
    return str(answer.json["choices"][0]["message"]["content"])


async def test_a_slow_body_in_the_middle_of_pipelined_requests_keeps_them_in_order(backend: ScriptedBackend) -> None:
    backend.plays(*echo())
    async with running(backend) as under_test, await under_test.client() as client:
        half = len(SLOW) - 10
        await client.send(FIRST + SLOW[:half])
        assert text_of(await client.answer()) == "first"
        await holds(lambda: under_test.gateway.server.answering == 0, "the first is answered")
        assert len(backend.ledger) == 1
        for at in range(half, len(SLOW)):
            await client.send(SLOW[at : at + 1])
        await client.send(LAST)
        assert [text_of(await client.answer()), text_of(await client.answer())] == ["slow", "last"]


async def test_a_body_that_never_ends_in_the_middle_of_a_pipeline_swallows_nothing_of_others(
    backend: ScriptedBackend,
) -> None:
    backend.plays(*echo())
    async with running(backend) as under_test:
        async with await under_test.client() as client:
            await client.send(FIRST + SLOW[:-10])
            assert text_of(await client.answer()) == "first"
            async with await under_test.client() as other:
                await other.send(LAST)
                assert text_of(await other.answer()) == "last"
        await under_test.comes_to_rest()
        assert len(backend.ledger) == 2


async def test_empty_lines_before_a_request_are_passed_over(backend: ScriptedBackend) -> None:
    backend.plays(*echo())
    async with running(backend) as under_test:
        found = await answers(under_test, b"\r\n" * 1000 + FIRST + b"\r\n\r\n" + LAST, 2)
        assert [text_of(answer) for answer in found] == ["first", "last"]


async def test_empty_lines_alone_are_no_request(backend: ScriptedBackend) -> None:
    async with running(backend, sections={"server": {"keep_alive_seconds": 0.2}}) as under_test:
        async with await under_test.client() as client:
            await client.send(b"\r\n" * 5000)
            assert not (await client.end()).reset
        assert under_test.outcomes == {}


EXPECTATIONS = {
    b"expect: 100-Continue": 200, b"Expect: 100-CONTINUE": 200, b"expect:100-continue": 200,
    b"expect: 100-continue, x": 400, b"expect: x, 100-continue": 400, b"expect: 100-continue;q=1": 400,
    b"expect: 100": 400, b"expect: 417": 400, b"expect:": 400, b"expect: 100-continue\r\nexpect: 100-continue": 400,
    b"expect: 100-continue\r\nexpect: x": 400, b"expect: 100-contin\0ue": 400, b"expect : 100-continue": 400,
}  # fmt: skip


@pytest.mark.parametrize("line", EXPECTATIONS)
async def test_the_only_expectation_that_is_met_is_100_continue(backend: ScriptedBackend, line: bytes) -> None:
    backend.plays(*echo())
    async with running(backend) as under_test:
        found = await answers(under_test, request(chat("expecting"), line), 1)
        assert [answer.status for answer in found] == [EXPECTATIONS[line]]
        assert len(backend.ledger) == (EXPECTATIONS[line] == 200)


UPGRADES = (b"h2c", b"websocket", b"TLS/1.0", b"h2c, websocket", b"connect-udp", b"")


@pytest.mark.parametrize("protocol", UPGRADES)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_of_another_protocol_is_passed_over_and_what_follows_is_no_request(
    backend: ScriptedBackend, protocol: bytes, chunked: bool
) -> None:
    backend.plays(*echo())
    body = chat("offering")
    framing = b"content-length: %d\r\n\r\n%b" % (len(body), body)
    if chunked:
        framing = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: %b\r\n" % protocol
    async with running(backend) as under_test:
        found = await answers(under_test, head + framing + b"\x00\x01binary", 1)
        assert [answer.status for answer in found] == [200]
        assert text_of(found[0]) == "offering"
        assert [seen.body for seen in backend.ledger] == [body]
        assert backend.ledger[0].header(b"upgrade") is None


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("connection", [b"", b"connection: close\r\n", b"connection: keep-alive\r\n"])
async def test_a_connection_lives_as_long_as_its_version_and_headers_say(
    backend: ScriptedBackend, version: bytes, connection: bytes
) -> None:
    backend.plays(*echo())
    data = FIRST.replace(b"HTTP/1.1", b"HTTP/" + version).replace(
        b"host: gateway\r\n", b"host: gateway\r\n" + connection
    )
    stays = b"keep-alive" in connection or (version == b"1.1" and not connection)
    async with running(backend) as under_test:
        found = await answers(under_test, data + data, 2)
        assert [answer.status for answer in found] == [200] * (1 + stays)
        await asyncio.sleep(0)
        assert len(backend.ledger) == 1 + stays
