"""The handshake and the frames of WebSocket, in any pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.realtime.websocket import (
    FrameScanner,
    accept_of,
    close_frame,
    first_frame_bytes,
    messages_of,
    text_frame,
)

SMALL = st.integers(0, 300)
SIZES = st.one_of(SMALL, st.sampled_from([65535, 65536]))


def masked(payload: bytes, opcode: int = 1, mask: bytes = b"\x01\x02\x03\x04", final: bool = True) -> bytes:
    """A frame as clients send it."""
    whole = text_frame(payload)
    head = whole[: len(whole) - len(payload)]
    covered = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes((0x80 * final | opcode, 0x80 | head[1])) + head[2:] + mask + covered


def test_the_handshake_is_that_of_the_rfc() -> None:
    assert accept_of(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@given(
    st.one_of(
        st.tuples(st.lists(SMALL, max_size=4), st.integers(1, 9)),
        st.tuples(st.lists(SIZES, max_size=4), st.integers(5000, 70000)),
    )
)
def test_frames_are_counted_in_any_pieces(cut: tuple[list[int], int]) -> None:
    sizes, size = cut
    wire, scanner = b"".join(text_frame(b"x" * each) for each in sizes), FrameScanner()
    for start in range(0, len(wire), size):
        scanner.scan(wire[start : start + size])
    assert scanner.frames == len(sizes)
    assert scanner.is_between_frames


@given(SIZES, st.floats(0, 1))
def test_nothing_may_be_written_inside_a_frame(size: int, share: float) -> None:
    wire, scanner = text_frame(b"x" * size), FrameScanner()
    scanner.scan(wire[: 1 + int(share * (len(wire) - 2))])
    assert not scanner.is_between_frames
    assert (scanner.frames, scanner.closed) == (0, False)


def test_after_a_close_frame_nothing_follows() -> None:
    scanner = FrameScanner()
    scanner.scan(text_frame(b"a") + close_frame(1000, "bye"))
    assert scanner.closed
    assert not scanner.is_between_frames


@given(st.lists(st.binary(max_size=300), max_size=3), st.integers(0, 3))
def test_the_text_messages_of_a_client_are_read(payloads: list[bytes], cut_bytes: int) -> None:
    ping, part = masked(b"p", opcode=9), masked(b"q", final=False)
    wire = b"".join(masked(payload) + ping + part for payload in payloads) + masked(b"last")[: cut_bytes + 1]
    unread = bytearray(wire)
    assert list(messages_of(unread)) == payloads
    assert bytes(unread) == masked(b"last")[: cut_bytes + 1]  # no frame is looked at twice


def test_a_message_in_pieces_is_read_once_it_is_whole() -> None:
    unread, found = bytearray(), list[bytes]()
    for at in range(len(wire := masked(b"one") + masked(b"two"))):
        unread += wire[at : at + 1]
        found += messages_of(unread)
    assert (found, bytes(unread)) == ([b"one", b"two"], b"")


@given(SIZES)
def test_the_first_frame_is_complete_at_its_last_byte(size: int) -> None:
    wire = text_frame(b"x" * size)
    assert first_frame_bytes(wire) == first_frame_bytes(wire + b"more") == len(wire)
    assert first_frame_bytes(wire[:-1]) == 0


@pytest.mark.parametrize("reason", ["", "bye", "ü" * 100])
def test_a_close_frame_is_a_short_one(reason: str) -> None:
    frame = close_frame(1001, reason)
    assert len(frame) <= 127
    assert frame[2:4] == b"\x03\xe9"
    assert reason.startswith(frame[4:].decode())
