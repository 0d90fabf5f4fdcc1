"""How an answer begins: what is held until its first token, and the id of a response in its first bytes."""

import pytest

from gateway.core.errors import AnswerBrokeOff
from tests.unit.relay.test_upstream_response import CHUNK, DONE, EVENTS, Scene

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
CREATED = b'event: response.created\ndata: {"response":{}}\n\n'


@pytest.mark.parametrize("structure", [ROLE, CREATED, CREATED + ROLE, b": ping\n\n"])
async def test_the_clock_stops_at_the_first_token_and_until_then_nothing_is_passed_on(structure: bytes) -> None:
    scene = Scene()
    scene.head(headers=EVENTS)
    for _ in range(3):
        scene.body(structure)
        scene.now += 1
    assert (scene.sink.begun, scene.first_tokens, scene.came) == (False, 0, [])
    assert scene.memory.used_bytes == 3 * len(structure)
    scene.body(CHUNK)
    assert (scene.sink.body, scene.first_tokens) == (structure * 3 + CHUNK, 1)
    scene.now += 1
    scene.body(DONE, end=True)
    assert scene.answer.first_byte_seconds == 8.0
    assert scene.memory.used_bytes == 0


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stream_that_ends_before_its_first_token_is_no_answer_yet(ends: bool) -> None:
    for marker in (b"data: [DONE]", None):
        scene = Scene(done_marker=marker)
        scene.head(headers=EVENTS)
        scene.body(CREATED, end=ends)
        if not ends:
            scene.response.failed(AnswerBrokeOff("reset"))
        assert scene.fault == "FreshConnectionClosed"
        assert not scene.sink.begun
        scene.response.close()
        assert scene.memory.used_bytes == 0


async def test_the_opening_is_reported_once_and_before_it_is_passed_on() -> None:
    openings = list[tuple[bytes, bool]]()
    scene = Scene(done_marker=None, on_opening=lambda data: openings.append((data, scene.sink.begun)))
    scene.head(headers=EVENTS)
    scene.body(b'event: response.created\ndata: {"response":{"id":"re')
    assert openings == []
    scene.body(b'sp_1"}}\n\n')
    assert openings == []
    scene.body(CHUNK)
    assert openings == [(b'event: response.created\ndata: {"response":{"id":"resp_1"}}\n\n' + CHUNK, False)]
    scene.body(CHUNK, end=True)
    assert len(openings) == 1


async def test_the_opening_of_a_plain_answer_of_any_length_is_reported() -> None:
    for size in (10, 2_000_000):
        openings = list[bytes]()
        scene = Scene(done_marker=None, on_opening=openings.append)
        scene.head()
        scene.body(b'{"id":"resp_1"', b" " * size)
        scene.body(b"}", end=True)
        assert [data[:14] for data in openings] == [b'{"id":"resp_1"']


async def test_the_opening_of_an_error_is_not_reported() -> None:
    openings = list[bytes]()
    scene = Scene(done_marker=None, on_opening=openings.append)
    scene.head(404)
    scene.body(b'{"error":{"id":"resp_1"}}', end=True)
    assert openings == []
