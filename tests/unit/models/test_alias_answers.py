"""Answers to clients that use an alias, from the backend's connection to the sink."""

import pytest

from gateway.core.request import Usage
from tests.unit.relay.test_upstream_response import DONE, EVENTS, JSON, Scene


async def test_a_plain_answer_has_the_alias_of_its_client() -> None:
    scene = Scene(alias="gpt-4o")
    scene.head()
    scene.body(b'{"id":"c-1","model":"or')
    scene.body(
        b'g/m","choices":[{"text":"\\"model\\":\\"org/m\\""}],"usage":{"prompt_tokens":3,"completion_tokens":4}}',
        end=True,
    )
    assert scene.sink.body.startswith(b'{"id":"c-1","model":"gpt-4o","choices":[{"text":"\\"model\\":\\"org/m')
    assert scene.answer.usage == Usage(3, 4)


async def test_a_long_plain_answer_has_the_alias_wherever_the_name_is() -> None:
    scene = Scene(alias="gpt-4o")
    scene.head()
    scene.body(b'{"content":"' + b"x" * 131072)
    scene.body(b'y","mod')
    assert scene.sink.begun
    scene.body(b"el")
    scene.body(b'":"org/m"', b"}", end=True)
    assert scene.sink.body == b'{"content":"' + b"x" * 131072 + b'y","model":"gpt-4o"}'
    assert scene.sink.complete


async def test_the_end_of_an_answer_that_was_kept_for_a_name_is_passed_on() -> None:
    scene = Scene(alias="gpt-4o")
    scene.head()
    scene.body(b'{"content":"' + b"x" * 140_000)
    scene.body(b'","model', end=True)
    assert scene.sink.body.endswith(b'x","model')


@pytest.mark.parametrize("headers", [JSON, [*JSON, (b"Content-Encoding", b"gzip")]])
async def test_an_error_or_a_compressed_answer_stays_as_it_is(headers: list[tuple[bytes, bytes]]) -> None:
    scene = Scene(alias="gpt-4o")
    scene.head(400 if headers is JSON else 200, headers)
    scene.body(b'{"model":"org/m"}', end=True)
    assert scene.sink.body == b'{"model":"org/m"}'


async def test_events_with_an_alias_are_read_one_by_one() -> None:
    scene = Scene(alias="gpt-4o")
    scene.sink.chunked = True
    scene.head(headers=EVENTS)
    event = b'data: {"id":"c-1","model":"org/m","choices":[{"delta":{"content":"a"}}]}\n\n'
    for _ in range(3):
        scene.body(event)
    assert not scene.connection.passes_chunks
    scene.body(DONE, end=True)
    assert scene.sink.body == 3 * event.replace(b"org/m", b"gpt-4o") + DONE
    assert scene.sink.framed == 0
