"""A realtime session keeps its model, in whatever frames and pieces its client asks for another one."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import GatewayError, InvalidRequest, ModelNotAllowed
from gateway.features.realtime.session_events import SessionEvents
from gateway.features.realtime.websocket import FrameHead, unmasked

TEXT, BINARY, MORE, PING = 1, 2, 0, 9
MASK = b"\x11\x22\x33\x44"
NAMES = {"m": "m", "fast": "m", "other": "other"}


def resolve(name: str) -> str:
    if name not in NAMES:
        raise ModelNotAllowed.of(name)
    return NAMES[name]


def frame(payload: bytes, opcode: int = TEXT, *, last: bool = True, bits: int = 0, mask: bytes = MASK) -> bytes:
    size = len(payload)
    if size < 126:
        length = bytes((0x80 | size,))
    else:
        length = b"\xfe" + size.to_bytes(2, "big") if size < 65536 else b"\xff" + size.to_bytes(8, "big")
    return bytes((0x80 * last | bits | opcode,)) + length + mask + unmasked(payload, mask)


def update(**fields: Any) -> bytes:
    return json.dumps({"type": "session.update"} | fields).encode()


def read(data: bytes) -> list[bytes]:
    """The payloads of the frames, which have to be whole."""
    found = []
    while data:
        head = FrameHead(data[:14])
        assert head.size_bytes
        assert head.mask
        end = head.size_bytes + head.payload_bytes
        assert end <= len(data)
        found.append(unmasked(data[head.size_bytes : end], head.mask))
        data = data[end:]
    return found


def passed(data: bytes, cuts: list[int] = []) -> bytes:  # noqa: B006
    events = SessionEvents("m", resolve)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return b"".join(events.passed(data[start:end]) for start, end in pairwise(edges))


APPEND = json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA" * 100}).encode()
CUTS = st.lists(st.integers(0, 900), max_size=9)


@given(CUTS)
def test_what_does_not_change_the_model_is_passed_on_byte_for_byte(cuts: list[int]) -> None:
    kept = update(model="m")
    data = b"".join(
        [
            frame(kept), frame(APPEND), frame(b"", PING), frame(kept[:9], last=False), frame(b"p", PING),
            frame(kept[9:], MORE), frame(APPEND, BINARY), frame(b"not json"), frame(b""), frame(update(x=1)),
        ]
    )  # fmt: skip
    assert passed(data, cuts) == data


@given(CUTS)
def test_an_alias_is_replaced_by_the_model(cuts: list[int]) -> None:
    sent = update(model="fast", x=[1])
    whole = frame(APPEND) + frame(sent) + frame(APPEND)
    parts = frame(APPEND) + frame(sent[:5], last=False) + frame(sent[5:30], MORE, last=False) + frame(sent[30:], MORE)
    for data in (whole, parts + frame(APPEND)):
        first, changed, last = read(passed(data, cuts))
        assert (first, last) == (APPEND, APPEND)
        assert json.loads(changed) == {"type": "session.update", "model": "m", "x": [1]}


OTHERS = [
    update(model="other"),
    update(model="absent"),
    update(session={"model": "other"}),
    update(model="m", session={"model": "absent"}),
    b'{"type":"session.update","model":"m","model":"other"}',
    b'{"type":"x","model":"other","type":"session.update"}',
    b'{"type":"session\\u002eupdate","model":"other"}',
    b'{"\\u0074ype":"session.update","mod\\u0065l":"other"}',
    b'{"type":"session.update","model":"other","x":NaN}',
    b'{"audio":"' + b"A" * 70_000 + b'","type":"session.update","model":"other"}',
    b'{"audio":"' + b"A" * 70_000 + b'","type":"session\\u002eupdate","model":"other"}',
    b'{"type":"session.update","model":"other","audio":"' + b"A" * 70_000 + b'"}',
]


@pytest.mark.parametrize("sent", OTHERS)
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
@pytest.mark.parametrize("step", [1, 7, 1000, 10**6])
@pytest.mark.parametrize("split", [False, True])
def test_another_model_never_reaches_the_backend(sent: bytes, opcode: int, step: int, split: bool) -> None:
    if len(sent) > 1000 and step < 1000:
        step = 500
    data = frame(sent, opcode)
    if split:
        at = len(sent) - 12
        data = frame(sent[:at], opcode, last=False) + frame(b"p", PING) + frame(sent[at:], MORE)
    events = SessionEvents("m", resolve)
    got = events.passed(frame(update(model="m")))
    ended = False
    for start in range(0, len(data), step):
        try:
            got += events.passed(data[start : start + step])
        except GatewayError:
            ended = True
            break
    assert ended
    rest = got[len(frame(update(model="m"))) :]
    assert b"other" not in unmasked(rest, MASK)
    assert len(rest) < len(data) - 8, "the backend does not get a whole message"


def test_a_long_message_is_passed_on_while_it_arrives() -> None:
    data = frame(b'{"type":"input_audio_buffer.append","audio":"' + b"A" * 1_000_000 + b'"}')
    events = SessionEvents("m", resolve)
    assert events.passed(data[:60_000]) == b""
    assert events.passed(data[60_000:200_000]) == data[:200_000]
    assert events.passed(data[200_000:]) == data[200_000:]
    assert events.passed(frame(APPEND)) == frame(APPEND)


@pytest.mark.parametrize("bits", [0x40, 0x20, 0x10])
def test_compressed_frames_are_refused(bits: int) -> None:
    with pytest.raises(InvalidRequest, match="extensions"):
        passed(frame(APPEND, bits=bits))
