import time
from collections.abc import Iterator

import pytest
import zmq

from gateway.features.exact.events import Sockets
from gateway.features.exact.stream import Replay
from tests.unit.exact.publisher import Publisher, removed


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets(time.monotonic, time.sleep)
    yield sockets
    sockets.context.destroy(linger=0)


def read_to_the_end(replay: Replay) -> list[int]:
    numbers, deadline = list[int](), time.monotonic() + 5
    while not replay.ended and time.monotonic() < deadline:
        replay.socket.poll(100)
        numbers += [number for number, _ in replay.messages()]
    return numbers


def test_messages_from_the_last_used_one_on_come_until_the_end_marker(sockets: Sockets) -> None:
    with Publisher() as publisher:
        for number in range(5):
            publisher.publish(removed([number]))
        assert publisher.replay_endpoint is not None
        replay = Replay(sockets, publisher.replay_endpoint, 3)
        assert read_to_the_end(replay) == [2, 3, 4]
        assert replay.ended
        replay.socket.close()


def test_an_answer_may_be_empty(sockets: Sockets) -> None:
    with Publisher() as publisher:
        assert publisher.replay_endpoint is not None
        replay = Replay(sockets, publisher.replay_endpoint, 0)
        assert read_to_the_end(replay) == []
        assert replay.ended
        replay.socket.close()


def test_what_is_no_message_is_passed_over(sockets: Sockets) -> None:
    router = sockets.context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    replay = Replay(sockets, f"tcp://127.0.0.1:{port}", 0)
    client, empty, start = router.recv_multipart()
    assert (empty, start) == (b"", bytes(8))
    for frames in ([], [b"x"], [b"t", b"short", b"p"], [b"t", (7).to_bytes(8, "big"), b"p"], [b"", b"\xff" * 8, b""]):
        router.send_multipart([client, b"", *frames])
    assert read_to_the_end(replay) == [7]
    assert replay.ended
    replay.socket.close()
    router.close()
