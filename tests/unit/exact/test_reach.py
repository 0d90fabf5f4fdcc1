import asyncio

import pytest

from gateway.features.exact.endpoints import Source, why_unreachable
from tests.unit.backends.test_vllm_api import closed_port
from tests.unit.exact.listener import source_of
from tests.unit.exact.publisher import Publisher


async def test_a_publisher_is_reachable() -> None:
    with Publisher() as publisher:
        assert await why_unreachable(source_of(publisher), 5.0) is None


async def test_a_replay_endpoint_must_answer_too() -> None:
    endpoint = f"tcp://127.0.0.1:{closed_port()}"
    with Publisher() as publisher:
        why = await why_unreachable(Source(0, publisher.endpoint, endpoint), 5.0)
    assert why is not None
    assert why.startswith(endpoint)
    assert "refused" in why


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a ZeroMQ socket"),
        (b"\xff", "is not a ZeroMQ socket"),
        (None, "timed out"),
    ],
)
async def test_a_port_of_another_kind_is_an_error(says: bytes | None, why: str) -> None:
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if says is None:
            await reader.read()  # until the other side has had enough
        else:
            writer.write(says)
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        reason = await why_unreachable(Source(0, endpoint, None), 0.2)
        async with asyncio.timeout(5):
            await ended.wait()
    assert reason is not None
    assert why in reason


async def test_where_the_gateway_listens_there_is_nothing_to_reach() -> None:
    assert await why_unreachable(Source(0, "tcp://*:1", None, bind=True), 0.1) is None
