"""Until its first token a stream of any endpoint is retried and waited for; after it, silence is a stall."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import orjson
import pytest

from tests.clients import Client, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import Step, chunk, fin, hang, head, json_answer, last_chunk, raw, reset, until, whole

WAITING = b": waiting\n\n"
HELLO = [{"role": "user", "content": "Hello."}]


class Dialect(NamedTuple):
    """Streams of an endpoint: a request, the events before the first token, that of a token, and those at the end."""

    target: bytes
    fields: dict[str, object]
    structure: tuple[bytes, ...]
    token: bytes
    end: tuple[bytes, ...]

    @property
    def body(self) -> bytes:
        return orjson.dumps({"model": MODEL, "stream": True, **self.fields})

    def stream(self, *gaps: Step) -> tuple[Step, ...]:
        """A whole answer of two tokens. `gaps`: after the head, after the structure, between the tokens."""
        after_head, after_structure, between = (*gaps, *[_at_once] * 3)[:3]
        return (
            head(200), after_head, *map(chunk, self.structure), after_structure, chunk(self.token), between,
            chunk(self.token), *map(chunk, self.end), last_chunk(),
        )  # fmt: skip

    @property
    def events(self) -> bytes:
        return b"".join((*self.structure, self.token, self.token, *self.end))


async def _at_once(connection: object) -> None: ...


def _named(name: bytes, data: bytes = b"{}") -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, data)


_DONE = b"data: [DONE]\n\n"
_CREATED = b'{"response":{"id":"resp_1","instructions":"%b","usage":null},"type":"response.created"}'
_RESPONSE = Dialect(
    b"/v1/responses",
    {"input": HELLO},
    (
        _named(b"response.created", _CREATED % b"a"),
        _named(b"response.in_progress", _CREATED % b"a"),
        _named(b"response.output_item.added", b'{"item":{"type":"message","content":[]}}'),
        _named(b"response.content_part.added", b'{"part":{"text":""}}'),
    ),
    _named(b"response.output_text.delta", b'{"delta":"a"}'),
    (_named(b"response.completed", b'{"response":{"id":"resp_1","usage":{"input_tokens":9,"output_tokens":2}}}'),),
)
DIALECTS = {
    "chat": Dialect(
        b"/v1/chat/completions",
        {"messages": HELLO},
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',),
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        (_DONE,),
    ),
    "completions": Dialect(
        b"/v1/completions",
        {"prompt": "Hello."},
        (b'data: {"choices":[{"text":""}]}\n\n',),
        b'data: {"choices":[{"text":"a"}]}\n\n',
        (_DONE,),
    ),
    "messages": Dialect(
        b"/v1/messages",
        {"messages": HELLO, "max_tokens": 5},
        (
            _named(b"message_start", b'{"type":"message_start","message":{"usage":{"input_tokens":9}}}'),
            _named(b"content_block_start", b'{"type":"content_block_start","content_block":{"type":"text","text":""}}'),
            _named(b"ping", b'{"type":"ping"}'),
        ),
        _named(b"content_block_delta", b'{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}'),
        (_named(b"message_delta", b'{"delta":{},"usage":{"output_tokens":2}}'), _named(b"message_stop")),
    ),
    "responses": _RESPONSE,
    "responses, not stored": _RESPONSE._replace(fields={"input": HELLO, "store": False}),
    "responses, long instructions": _RESPONSE._replace(
        fields={"input": HELLO, "instructions": "a" * 300_000},
        structure=(
            _named(b"response.created", _CREATED % (b"a" * 300_000)),
            _named(b"response.in_progress", _CREATED % (b"a" * 300_000)),
        ),
    ),
}
ALL = pytest.mark.parametrize("name", DIALECTS)


async def seen(client: Client, mark: bytes, count: int = 1) -> bytes:
    """What comes until the mark has come that often."""
    found = b""
    async with asyncio.timeout(20):
        while found.count(mark) < count:
            found += await client.read()
    return found


@asynccontextmanager
async def asking(under_test: UnderTest, dialect: Dialect) -> AsyncIterator[Client]:
    async with await under_test.client() as client:
        await client.send(request(dialect.body, target=dialect.target))
        yield client


@ALL
@pytest.mark.parametrize("death", [fin, reset, last_chunk], ids=["fin", "reset", "clean end"])
async def test_a_backend_that_dies_in_its_prefill_loses_no_stream(
    backend: ScriptedBackend, other: ScriptedBackend, name: str, death: Callable[[], Step]
) -> None:
    dialect = DIALECTS[name]
    backend.plays(head(200), *map(chunk, dialect.structure), death())
    other.plays(*dialect.stream())
    async with running(backend, other, sections={"health": {"eject_failures": 100}}) as under_test:
        for _ in range(6):
            answer = await under_test.ask(dialect.body, target=dialect.target)
            assert (answer.status, answer.complete, answer.body) == (200, True, dialect.events)
        assert len(backend.ledger) >= 3
        assert under_test.outcomes == {"completed": 6}


@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_an_engine_that_shuts_down_in_a_prefill_loses_no_stream(
    backend: ScriptedBackend, other: ScriptedBackend, name: str
) -> None:
    dialect = DIALECTS[name]
    aborted = b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'
    backend.plays(head(200), *map(chunk, dialect.structure), chunk(aborted), *map(chunk, dialect.end), last_chunk())
    other.plays(*dialect.stream())
    async with running(backend, other, sections={"health": {"eject_failures": 100}}) as under_test:
        answers = [await under_test.ask(dialect.body, target=dialect.target) for _ in range(4)]
        assert {(answer.complete, answer.body) for answer in answers} == {(True, dialect.events)}
        assert backend.ledger


@ALL
async def test_a_silent_stream_gets_comments_between_its_events_before_and_after_the_first_token(
    backend: ScriptedBackend, name: str
) -> None:
    dialect, first, second = DIALECTS[name], asyncio.Event(), asyncio.Event()
    backend.plays(*dialect.stream(_at_once, until(first), until(second)))
    sections = {"admission": {"comment_seconds": 1}}
    async with running(backend, sections=sections) as under_test, asking(under_test, dialect) as client:
        before = await seen(client, WAITING, 2)
        assert b"event:" not in before
        assert b"data:" not in before
        first.set()
        between = await seen(client, WAITING)
        assert between.count(dialect.token) == 1
        second.set()
        rest = await seen(client, b"0\r\n\r\n")
        body = b"".join((before + between + rest).partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
        assert body.replace(WAITING, b"") == dialect.events
        for piece in body.split(WAITING):
            assert not piece or piece.endswith(b"\n\n")


@ALL
async def test_the_time_to_the_first_token_is_that_of_the_first_token(backend: ScriptedBackend, name: str) -> None:
    dialect, go, clock = DIALECTS[name], asyncio.Event(), asyncio.get_running_loop().time
    backend.plays(*dialect.stream(_at_once, until(go)))
    async with running(backend) as under_test:
        asked = asyncio.create_task(under_test.ask(dialect.body, target=dialect.target))
        await holds(lambda: bool(under_test.gateway.core.relay._under_way), "it is sent")
        [response] = under_test.gateway.core.relay._under_way
        await holds(lambda: response._opening is not None and bool(response._opening._held), "structure is held")
        [engine] = under_test.backend(backend).all_engines
        assert (engine.load.decoding, len(engine.load.pending)) == (0, 1)  # it is in prefill
        since = clock()
        go.set()
        assert (await asked).body == dialect.events
        await under_test.comes_to_rest()
    assert response._output_seconds is not None
    assert since <= response._output_seconds <= clock()
    [line] = [orjson.loads(line) for line in under_test.log.getvalue().splitlines()]
    assert 0 < line["first_byte_ms"] <= line["duration_ms"]
    assert under_test.gateway.core.metrics.first_byte.values


@pytest.mark.parametrize("store", [True, False])
async def test_the_id_of_a_response_in_the_background_is_passed_on_at_once(
    backend: ScriptedBackend, store: bool
) -> None:
    go, dialect = asyncio.Event(), _RESPONSE._replace(fields={"input": HELLO, "background": True, "store": store})
    backend.plays(*dialect.stream(_at_once, until(go)))
    async with running(backend) as under_test, asking(under_test, dialect) as client:
        assert b"resp_1" in await seen(client, dialect.structure[-1])
        [response] = under_test.gateway.core.relay._under_way
        assert response._output_seconds is None  # which was not its first token
        go.set()
        await seen(client, b"0\r\n\r\n")


@pytest.mark.parametrize("death", [fin, reset])
async def test_a_response_in_the_background_is_not_begun_twice(
    backend: ScriptedBackend, other: ScriptedBackend, death: Callable[[], Step]
) -> None:
    dialect = _RESPONSE._replace(fields={"input": HELLO, "background": True})
    for each in (backend, other):
        each.plays_once(head(200), *map(chunk, dialect.structure), death())
        each.plays(*json_answer())
    async with running(backend, other) as under_test:
        answer = await under_test.ask(dialect.body, target=dialect.target)
        assert not answer.complete
        assert b"stream_interrupted" in answer.body
        executed = [seen for each in (backend, other) for seen in each.ledger if seen.method == b"POST"]
        assert len(executed) == 1


GAPS = {"before the head": -1, "after the head": 0, "after the structure": 1, "between tokens": 2}


def _gap(dialect: Dialect | None, gap: str, step: Step) -> tuple[Step, ...]:
    """A stream, or a whole answer (None), that waits for the step."""
    if GAPS[gap] < 0:
        return (step, *(json_answer() if dialect is None else dialect.stream()))
    if dialect is None:
        document = whole(200, b'{"choices": []}')
        cut = {"after the head": document.index(b"{"), "between tokens": len(document) - 4}[gap]
        return (raw(document[:cut]), step, raw(document[cut:]))
    return dialect.stream(*[step if at == GAPS[gap] else _at_once for at in range(3)])


def _request(dialect: Dialect | None) -> tuple[bytes, bytes]:
    if dialect is None:
        return orjson.dumps({"model": MODEL, "messages": HELLO}), b"/v1/chat/completions"
    return dialect.body, dialect.target


_WAITS = [
    (name, gap)
    for name, gap in itertools.product([*DIALECTS, "whole"], GAPS)
    if name != "whole" or gap != "after the structure"
]


@pytest.mark.parametrize(("name", "gap"), _WAITS)
async def test_silence_before_the_first_token_is_no_stall_and_silence_after_it_is(
    backend: ScriptedBackend, name: str, gap: str
) -> None:
    dialect, go = DIALECTS.get(name), asyncio.Event()
    backend.plays(*_gap(dialect, gap, until(go)))
    body, target = _request(dialect)
    async with running(backend, sections={"upstream": {"idle_stream_timeout_seconds": 2}}) as under_test:
        asked = asyncio.create_task(under_test.ask(body, target=target))
        await holds(lambda: bool(under_test.gateway.core.relay._under_way), "it is sent")
        [response] = under_test.gateway.core.relay._under_way
        if gap == "between tokens":
            answer = await asked
            assert not answer.complete or answer.status == 502
            assert b"The backend sent no output for 2 s." in answer.body
            go.set()
        else:
            await holds(lambda: response._silent_seconds >= 4 or asked.done(), "it waits for longer than the limit")
            assert not asked.done()
            go.set()
            answer = await asked
            assert (answer.status, answer.complete) == (200, True)


@pytest.mark.parametrize(("name", "gap"), [each for each in _WAITS if each[1] != "between tokens"])
async def test_the_limit_of_the_first_token_holds_wherever_the_silence_begins(
    backend: ScriptedBackend, name: str, gap: str
) -> None:
    dialect = DIALECTS.get(name)
    backend.plays(*_gap(dialect, gap, hang()))
    body, target = _request(dialect)
    async with running(backend, sections={"upstream": {"first_byte_timeout_seconds": 1}}) as under_test:
        answer = await under_test.ask(body, target=target)
        assert (answer.status, answer.complete) == (504, True)
        await holds(lambda: backend.ledger[0].peer_left_at is not None, "its request is aborted")
        assert under_test.outcomes == {"backend_error": 1}


LIMITS = {
    "upstream": {"first_byte_timeout_seconds": 1, "idle_stream_timeout_seconds": 1},
    "health": {"eject_failures": 3},
}


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", ["chat", "responses"])
async def test_requests_that_stall_eject_no_backend_that_answers_others(
    backend: ScriptedBackend, name: str, gap: str
) -> None:
    dialect, stalls = DIALECTS[name], 8
    async with running(backend, sections=LIMITS) as under_test:
        for _ in range(stalls):
            backend.plays_once(*_gap(dialect, gap, hang()))
        asked = [asyncio.create_task(under_test.ask(dialect.body, target=dialect.target)) for _ in range(stalls)]
        await holds(lambda: len(backend.ledger) == stalls, "all of them wait")
        backend.plays(*dialect.stream())
        while not all(each.done() for each in asked):
            assert (await under_test.ask(dialect.body, target=dialect.target)).complete
        assert under_test.backend(backend).health.ejections == 0
        assert under_test.state(backend) == "up"


async def test_requests_that_stall_eject_no_backend_while_another_stream_goes_on(backend: ScriptedBackend) -> None:
    dialect, go, stalls = DIALECTS["chat"], asyncio.Event(), 8

    async def tokens(connection: object) -> None:
        while not go.is_set():
            await chunk(dialect.token)(connection)  # type: ignore[arg-type]
            await asyncio.sleep(0.01)

    async with running(backend, sections=LIMITS) as under_test:
        backend.plays_once(*dialect.stream(_at_once, _at_once, tokens))
        asked = [asyncio.create_task(under_test.ask(dialect.body))]
        await holds(lambda: len(backend.ledger) == 1, "one is answered")
        backend.plays(*dialect.stream(hang()))
        asked += [asyncio.create_task(under_test.ask(dialect.body)) for _ in range(stalls)]
        await holds(lambda: under_test.outcomes.get("backend_error") == stalls, "the others stall")
        assert under_test.backend(backend).health.ejections == 0
        go.set()
        assert (await asked[0]).complete
        await asyncio.gather(*asked)


@pytest.mark.parametrize("gap", GAPS)
async def test_a_backend_that_is_silent_for_all_is_ejected(backend: ScriptedBackend, gap: str) -> None:
    dialect, stalls = DIALECTS["responses"], 8
    backend.plays(*_gap(dialect, gap, hang()))
    async with running(backend, sections=LIMITS) as under_test:
        await asyncio.gather(*(under_test.ask(dialect.body, target=dialect.target) for _ in range(stalls)))
        assert under_test.backend(backend).health.ejections >= 1
