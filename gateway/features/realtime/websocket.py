"""The parts of WebSocket (RFC 6455) that a relay needs: the handshake, where frames end, and a few frames of its own.

Frames are passed on as they come. Pure.
"""

import base64
import hashlib
from collections.abc import Iterator
from typing import Final

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT: Final = 1
_CLOSE: Final = 8
_MAX_CONTROL_BYTES: Final = 125
GOING_AWAY: Final = 1001
POLICY: Final = 1008
SERVER_ERROR: Final = 1011


def accept_of(key: bytes) -> bytes:
    """The value of Sec-WebSocket-Accept that answers this Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


def text_frame(text: bytes) -> bytes:
    """A whole text message of a server."""
    size = len(text)
    if size <= _MAX_CONTROL_BYTES:
        head = bytes((0x80 | _TEXT, size))
    elif size < 65536:
        head = bytes((0x80 | _TEXT, 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | _TEXT, 127)) + size.to_bytes(8, "big")
    return head + text


def masked_text_frame(text: bytes) -> bytes:
    """The same of a client, with a mask that changes nothing."""
    frame = text_frame(text)
    head = len(frame) - len(text)
    return bytes((frame[0], frame[1] | 0x80)) + frame[2:head] + b"\0\0\0\0" + text


def close_frame(code: int, reason: str) -> bytes:
    """The close frame of a server; a long reason is cut."""
    text = reason.encode()[: _MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()
    return bytes((0x80 | _CLOSE, 2 + len(text))) + code.to_bytes(2, "big") + text


class FrameHead:
    """The head of a frame, complete or not: `size_bytes` = 0 while it is not."""

    __slots__ = ("is_final", "mask", "opcode", "payload_bytes", "size_bytes")

    def __init__(self, data: bytes | bytearray) -> None:
        self.size_bytes = 0
        self.opcode = self.payload_bytes = 0
        self.mask = b""
        self.is_final = False
        if len(data) < 2:
            return
        length = data[1] & 0x7F
        extended = 8 if length == 127 else 2 if length == 126 else 0
        masked = 4 if data[1] & 0x80 else 0
        size = 2 + extended + masked
        if len(data) < size:
            return
        self.size_bytes = size
        self.is_final = data[0] & 0x80 != 0
        self.opcode = data[0] & 0x0F
        self.payload_bytes = int.from_bytes(data[2 : 2 + extended], "big") if extended else length
        self.mask = bytes(data[size - masked : size])


class FrameScanner:
    """Follows the frames of one direction: counts complete frames, and notes a close frame."""

    __slots__ = ("_head", "_left_bytes", "closed", "frames")

    def __init__(self) -> None:
        self._head = b""  # the beginning of a head
        self._left_bytes = 0
        self.frames = 0
        self.closed = False

    @property
    def is_between_frames(self) -> bool:
        """Whether another frame may be written now."""
        return not self._left_bytes and not self._head and not self.closed

    def scan(self, data: bytes) -> None:
        if self._head:
            data = self._head + data
        at, end = self._left_bytes, len(data)  # at: where the next head is
        frames = int(0 < at <= end)
        while end - at >= 2:
            length = data[at + 1]
            size = 6 if length & 0x80 else 2
            length &= 0x7F
            if length > _MAX_CONTROL_BYTES:
                extended = 8 if length == 127 else 2
                size += extended
                length = int.from_bytes(data[at + 2 : at + 2 + extended], "big")
            if end - at < size:
                break
            if data[at] & 0x0F == _CLOSE:
                self.closed = True
            at += size + length
            frames += at <= end
        self.frames += frames
        self._head = data[at:]
        self._left_bytes = max(0, at - end)


def messages_of(data: bytearray) -> Iterator[bytes]:
    """The whole text messages at the start of a client's data, of one frame each; others are left out.

    Afterwards the data has only an incomplete frame.
    """
    at = 0
    while True:
        head = FrameHead(data[at : at + 14])
        start = at + head.size_bytes
        end = start + head.payload_bytes
        if not head.size_bytes or end > len(data):
            del data[:at]
            return
        if head.opcode == _TEXT and head.is_final:
            payload = bytes(data[start:end])
            yield unmasked(payload, head.mask) if head.mask else payload
        at = end


def first_frame_bytes(data: bytes | bytearray) -> int:
    """The size of the first frame; 0 = it is not complete."""
    head = FrameHead(data[:14])
    size = head.size_bytes + head.payload_bytes
    return size if head.size_bytes and size <= len(data) else 0


def unmasked(payload: bytes, mask: bytes, start: int = 0) -> bytes:
    """Bytes of a payload from `start` on."""
    size = len(payload)
    stream = (mask * (size // 4 + 2))[start % 4 : start % 4 + size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")).to_bytes(size, "big")
