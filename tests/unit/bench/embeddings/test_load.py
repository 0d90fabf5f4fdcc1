"""Clients that ask for embeddings."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

import pytest

from loadtest.report.statistics import percentile
from tests.bench.embeddings.load import LoadFailed, bodies, put_on


@asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[str]:
    """Answers every request like this; left when its last connection is closed."""
    open_connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_connections.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await asyncio.gather(*open_connections)


def test_texts_have_as_many_words_as_wanted_and_differ() -> None:
    made = [json.loads(body) for body in islice(bodies("m", 4, "float", 1), 50)]
    assert {len(each["input"].split()) for each in made} == {4}
    assert len({each["input"] for each in made}) > 45
    assert made[0]["encoding_format"] == "float"


async def test_answers_are_counted_and_timed() -> None:
    async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as url:
        answers = await put_on(url, bodies("m", 2, "base64", 1), 3, 0.2)
    assert answers.all >= len(answers.latencies) > 0
    assert answers.per_second == len(answers.latencies) / 0.2
    assert 0 < min(answers.latencies) <= percentile(sorted(answers.latencies), 99) < 0.2


async def test_an_answer_that_is_none_ends_the_measurement() -> None:
    async with server(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy") as url:
        with pytest.raises(ExceptionGroup) as caught:
            await put_on(url, bodies("m", 2, "base64", 1), 1, 0.2)
    assert caught.group_contains(LoadFailed, match="503.*busy")
