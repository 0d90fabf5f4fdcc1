import pytest

from gateway.core.front.body import body_parser, has_body


class Taken:
    """What a body parser was given."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({b"content-length": b"0"}, False),
        ({b"content-length": b"000"}, False),
        ({b"content-length": b"10"}, True),
        ({b"transfer-encoding": b"chunked"}, True),
    ],
)
def test_the_framing_shows_whether_a_body_follows(headers: dict[bytes, bytes], expected: bool) -> None:
    assert has_body(headers) == expected


@pytest.mark.parametrize(
    ("headers", "wire"),
    [
        ({b"content-length": b"5"}, b"hello"),
        ({b"transfer-encoding": b"chunked"}, b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_body_is_read_in_any_pieces(headers: dict[bytes, bytes], wire: bytes, size: int) -> None:
    taken = Taken()
    parser = body_parser(taken, headers)
    for start in range(0, len(wire), size):
        assert not taken.complete
        parser.feed_data(wire[start : start + size])
    assert (taken.body, taken.complete) == (b"hello", True)
