"""Request smuggling: whatever framing a client makes up, a backend sees no request that no client sent."""

import asyncio

import pytest

from tests.clients import EndOfConnection, chat
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend

INNER_BODY = chat("SMUGGLED")
INNER = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(INNER_BODY), INNER_BODY)
OUTER_BODY = chat("outer")
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"

# Ways to write the header so that one parser might see it and another not.
SPELLINGS = {
    "plain": b"Transfer-Encoding: chunked", "no space": b"Transfer-Encoding:chunked",
    "tab": b"Transfer-Encoding:\tchunked", "space before colon": b"Transfer-Encoding : chunked",
    "tab before colon": b"Transfer-Encoding\t: chunked", "leading space": b" Transfer-Encoding: chunked",
    "leading tab": b"\tTransfer-Encoding: chunked", "folded": b"Transfer-Encoding:\r\n chunked",
    "folded by tab": b"Transfer-Encoding:\r\n\tchunked", "bare LF": b"X: y\nTransfer-Encoding: chunked",
    "bare CR": b"X: y\rTransfer-Encoding: chunked", "CR in the name": b"Transfer-\rEncoding: chunked",
    "vertical tab": b"Transfer-Encoding:\x0bchunked", "form feed": b"Transfer-Encoding:\x0cchunked",
    "NUL before": b"Transfer-Encoding: \0chunked", "NUL after": b"Transfer-Encoding: chunked\0",
    "NUL in the name": b"Transfer-Encoding\0: chunked", "non-breaking space": b"Transfer-Encoding:\xa0chunked",
    "byte 255 after": b"Transfer-Encoding: chunked\xff", "byte 127 after": b"Transfer-Encoding: chunked\x7f",
    "quoted": b'Transfer-Encoding: "chunked"', "single-quoted": b"Transfer-Encoding: 'chunked'",
    "comma after": b"Transfer-Encoding: chunked,", "comma before": b"Transfer-Encoding: ,chunked",
    "semicolon": b"Transfer-Encoding: chunked;q=1", "identity first": b"Transfer-Encoding: identity, chunked",
    "identity last": b"Transfer-Encoding: chunked, identity", "cow first": b"Transfer-Encoding: cow, chunked",
    "cow last": b"Transfer-Encoding: chunked, cow", "chunk": b"Transfer-Encoding: chunk",
    "prefix": b"Transfer-Encoding: xchunked",
    "suffix": b"Transfer-Encoding: chunkedx", "two words": b"Transfer-Encoding: x chunked",
    "capitals": b"TRANSFER-ENCODING: CHUNKED", "mixed case": b"tRANSFER-eNCODING: cHuNkEd",
    "empty": b"Transfer-Encoding:",
    "underscore": b"Transfer_Encoding: chunked",
    "twice, second bad": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: cow",
    "twice, first bad": b"Transfer-Encoding: cow\r\nTransfer-Encoding: chunked",
    "twice": b"Transfer-Encoding: chunked\r\nTransfer-encoding: chunked", "colon twice": b"Transfer-Encoding:: chunked",
    "kelvin sign": b"Transfer-Encoding: chun\xe2\x84\xaaed", "trailing tab": b"Transfer-Encoding: chunked\t",
    "trailing spaces": b"Transfer-Encoding: chunked   ", "dot": b"Transfer-Encoding: chunked.",
    "backspace": b"Transfer-Encoding: chunked\x08", "in the request line": b"Transfer-Encoding:\x00chunked",
}  # fmt: skip

CHUNKED_OUTER = b"%x\r\n%b\r\n0\r\n\r\n" % (len(OUTER_BODY), OUTER_BODY)


def cl_te(spelling: bytes) -> bytes:
    """By its length the whole is one body; by its chunks a second request follows."""
    body = CHUNKED_OUTER + INNER
    return HEAD + b"Content-Length: %d\r\n" % len(body) + spelling + b"\r\n\r\n" + body


def te_cl(spelling: bytes) -> bytes:
    """By its chunks the whole is one body; by its length a second request follows."""
    size = b"%x\r\n" % len(INNER)
    body = size + INNER + b"\r\n0\r\n\r\n"
    return HEAD + b"Content-Length: %d\r\n" % len(size) + spelling + b"\r\n\r\n" + body


def te_te(spelling: bytes) -> bytes:
    """The same without any length."""
    return HEAD + spelling + b"\r\n\r\n" + CHUNKED_OUTER


def zero_length(spelling: bytes) -> bytes:
    """By its length there is no body."""
    return HEAD + b"Content-Length: 0\r\n" + spelling + b"\r\n\r\n" + CHUNKED_OUTER.replace(OUTER_BODY, INNER_BODY)


SHAPES = {"CL.TE": cl_te, "TE.CL": te_cl, "TE": te_te, "CL.0": zero_length}


@pytest.mark.parametrize("shape", SHAPES)
async def test_no_spelling_of_transfer_encoding_smuggles_a_request(backend: ScriptedBackend, shape: str) -> None:
    async with running(backend) as under_test:
        for name, spelling in SPELLINGS.items():
            before = len(backend.ledger)
            async with await under_test.client() as client:
                statuses = []
                try:
                    await client.send(SHAPES[shape](spelling))
                    while True:
                        statuses.append((await client.answer(0.3)).status)
                except (EndOfConnection, TimeoutError):
                    pass
            bodies = [seen.body for seen in backend.ledger[before:]]
            assert bodies in ([], [OUTER_BODY]), (name, statuses, bodies)
            assert statuses.count(200) == len(bodies), (name, statuses)
            assert len(statuses) <= 2, (name, statuses)
        await under_test.comes_to_rest()
        assert backend.malformed == []


LENGTHS = {
    "twice, different": b"Content-Length: 5\r\nContent-Length: %d",
    "twice, same": b"Content-Length: %d\r\nContent-Length: %d",
    "list": b"Content-Length: %d, %d", "plus": b"Content-Length: +%d", "minus": b"Content-Length: -%d",
    "leading zeros": b"Content-Length: 000%d", "dot": b"Content-Length: %d.0", "exponent": b"Content-Length: %de0",
    "hex": b"Content-Length: 0x%d", "space inside": b"Content-Length: 1 %d",
    "space before colon": b"Content-Length : %d",
    "tab after": b"Content-Length: %d\t", "vertical tab": b"Content-Length: \x0b%d",
    "folded": b"Content-Length:\r\n %d",
    "NUL": b"Content-Length: %d\0", "underscore in the name": b"Content_Length: %d",
    "arabic digits": b"Content-Length: \xd9\xa1",
    "bare LF before": b"X: y\nContent-Length: %d", "comma": b"Content-Length: %d,", "empty": b"Content-Length:",
    "quoted": b'Content-Length: "%d"', "huge": b"Content-Length: 99999999999999999999%d",
}  # fmt: skip


async def test_no_spelling_of_content_length_smuggles_a_request(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for name, spelling in LENGTHS.items():
            before = len(backend.ledger)
            size = len(OUTER_BODY)
            line = spelling.replace(b"%d", b"%d" % size)
            async with await under_test.client() as client:
                statuses = []
                try:
                    await client.send(HEAD + line + b"\r\n\r\n" + OUTER_BODY + INNER[:-1])
                    while True:
                        statuses.append((await client.answer(0.3)).status)
                except (EndOfConnection, TimeoutError):
                    pass
            bodies = [seen.body for seen in backend.ledger[before:]]
            assert bodies in ([], [OUTER_BODY]), (name, statuses, bodies)


CHUNK_SIZES = [
    b"%x;", b"%x;a", b"%x ;a=b", b"%x; a=b", b"%x;a=\n", b"%x;a=\r", b"0%x", b"000000000000000%x", b"0x%x",
    b"+%x", b"-%x",
    b" %x", b"%x ", b"%x\t", b"%x\x0b", b"%x\n", b"%x\r", b"%x\0", b"%xg", b"g%x", b"%x,%x", b"\n%x", b"\r\n%x", b"",
    b"%x;a=\"\r\n\"", b"ffffffffffffffff%x", b"1%x;", b"%x\xa0",
]  # fmt: skip


async def test_no_spelling_of_a_chunk_size_smuggles_a_request(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        for spelling in CHUNK_SIZES:
            before = len(backend.ledger)
            size = spelling.replace(b"%x", b"%x" % len(OUTER_BODY))
            data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n" + OUTER_BODY + b"\r\n0\r\n\r\n"
            async with await under_test.client() as client:
                statuses = []
                try:
                    await client.send(data)
                    while True:
                        statuses.append((await client.answer(0.2)).status)
                except (EndOfConnection, TimeoutError):
                    pass
            bodies = [seen.body for seen in backend.ledger[before:]]
            assert bodies in ([], [OUTER_BODY]), (spelling, statuses, bodies)


async def test_two_whole_requests_are_two_requests_in_every_cut(backend: ScriptedBackend) -> None:
    first = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED_OUTER
    data = first + INNER
    async with running(backend) as under_test:
        for cut in range(1, len(data), 7):
            before = len(backend.ledger)
            async with await under_test.client() as client:
                await client.send(data[:cut])
                await asyncio.sleep(0)
                await client.send(data[cut:])
                assert [(await client.answer()).status, (await client.answer()).status] == [200, 200]
            assert [seen.body for seen in backend.ledger[before:]] == [OUTER_BODY, INNER_BODY]


async def test_a_request_that_is_cut_short_never_borrows_from_the_next_client(backend: ScriptedBackend) -> None:
    async with running(backend) as under_test:
        victim = await under_test.client()
        async with await under_test.client() as attacker:
            await attacker.send(HEAD + b"Content-Length: 500\r\n\r\n" + INNER[:100])
            await victim.send(INNER)
            assert (await victim.answer()).status == 200
        victim.close()
        await under_test.comes_to_rest()
        assert [seen.body for seen in backend.ledger] == [INNER_BODY]
        await holds(lambda: backend.running == 0, "nothing runs")
