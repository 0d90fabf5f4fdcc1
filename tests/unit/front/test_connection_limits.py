"""How slow a client may be, and how uploads are passed on."""

import pytest

from gateway.core.front.http_request import HttpRequest
from gateway.core.front.reply import JSON, ClientResponse
from tests.unit.front.clients import GET, POST, UPLOAD, Scene, hang, play
from tests.unit.scheduling.virtual_time import turns

# Slow clients.


@pytest.mark.parametrize(
    ("sent", "seconds", "status"),
    [(b"", 75.0, None), (b"GET / HT", 10.0, 408), (POST[:-1], 5.0, 408), (GET, 75.0, None)],
    ids=["idle", "in its head", "in its body", "after an answer"],
)
def test_a_client_may_be_only_so_slow(sent: bytes, seconds: float, status: int | None) -> None:
    async def scenario(scene: Scene) -> None:
        if sent:
            await scene.send(sent)
        before, began = scene.wire.sent, scene.loop.time()
        scene.client.look(began + seconds - 0.01)
        await turns(3)
        assert scene.wire.sent == before
        assert not scene.wire.closed
        scene.client.look(began + seconds + 0.01)
        await turns(3)
        if status is None:
            assert scene.wire.closed
        else:
            assert scene.statuses == [status]

    play(scenario)


def test_a_client_that_is_answered_is_never_too_slow() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(POST)
        scene.client.look(scene.loop.time() + 10_000)
        await turns(3)
        assert not scene.wire.closed
        assert scene.ended == []

    play(scenario, hang)


def test_a_client_that_takes_nothing_for_a_minute_is_dropped() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(POST)
        now, scene.wire.unsent_bytes = scene.loop.time(), 1000  # too little for the transport to pause the relay
        scene.client.look(now + 59.9)
        assert not scene.wire.aborted
        scene.client.look(now + 60.1)
        assert scene.wire.aborted

    play(scenario, hang)


def test_a_client_that_takes_a_little_every_minute_is_not_dropped() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(POST)
        scene.client.pause_writing()
        for minute in range(5):
            scene.wire.unsent_bytes = 300_000 - minute
            scene.client.look(scene.loop.time() + 59.0 * (minute + 1))
        assert not scene.wire.aborted

    play(scenario, hang)


def test_a_client_that_takes_nothing_is_dropped_after_its_connection_was_closed_too() -> None:
    async def scenario(scene: Scene) -> None:
        now, scene.wire.unsent_bytes = scene.loop.time(), 1000
        scene.client.close()
        scene.client.look(now + 60.1)
        assert scene.wire.aborted

    play(scenario, hang)


# Uploads.


async def take_all(incoming: HttpRequest, reply: ClientResponse) -> None:
    """Answers with the upload."""
    assert incoming.upload is not None
    reply.send(200, JSON, b"", b"".join([piece async for piece in incoming.upload]))


def test_an_upload_is_answered_while_it_arrives_and_ends_the_connection() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(UPLOAD, b"he")
        assert scene.client.answering
        await scene.send(b"llo")
        assert scene.wire.sent.endswith(b"\r\n\r\nhello")
        scene.client.look(scene.loop.time() + 2.1)
        assert scene.wire.closed

    play(scenario, take_all)


@pytest.mark.parametrize("how", ["leaves", "is too slow", "sends too much", "sends garbage"])
def test_the_reader_of_an_upload_gets_an_error_if_it_stays_incomplete(how: str) -> None:
    async def scenario(scene: Scene) -> None:
        chunked = UPLOAD.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked")
        await scene.send(chunked, b"2\r\nhe\r\n")
        if how == "leaves":
            scene.leave()
            await turns(3)
            assert scene.ended == ["cancelled"]
            return
        if how == "is too slow":
            scene.client.look(scene.loop.time() + 5.1)
        elif how == "sends too much":
            await scene.send(b"8\r\n12345678\r\n")
        else:
            await scene.send(b"zz\r\n")
        await turns(3)
        assert scene.ended == ["refused"]
        assert scene.statuses == [{"is too slow": 408, "sends too much": 413, "sends garbage": 400}[how]]

    play(scenario, take_all, max_upload_bytes=6)


def test_an_upload_that_is_not_read_gets_backpressure() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(UPLOAD.replace(b"Length: 5", b"Length: 1500000"), b"x" * 1_100_000)
        assert not scene.wire.reading

    play(scenario, hang)
