"""An answer in memory."""

import pytest

from gateway.embeddings.collected import Collected


def test_a_whole_answer() -> None:
    sink = Collected()
    sink.comment()
    assert not sink.begun
    sink.send(200, b"application/json", b"x: y\r\n", b"{}")
    assert sink.begun
    assert (sink.status, sink.content_type, sink.headers, sink.body) == (200, b"application/json", b"x: y\r\n", b"{}")


def test_a_long_answer_in_pieces() -> None:
    sink = Collected()
    sink.begin(200, b"application/json", b"")
    assert [sink.write(b"ab"), sink.write(b"cd")] == [False, False]
    sink.end()
    assert sink.body == b"abcd"
    assert repr(sink) == "<Collected 200, 4 bytes>"


@pytest.mark.parametrize("name", ["blocked", "begun"])
def test_it_always_has_room(name: str) -> None:
    assert getattr(Collected(), name) is False
