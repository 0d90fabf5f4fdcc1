"""The load of the restart bench notes every request, whatever became of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.bench.restarts.load import Load, LoadOptions, Sent, read
from tests.bench.restarts.requests import Planned, Requests
from tests.unit.bench.restarts.answers import answer

ENOUGH = 40
_DEADLINE_SECONDS = 50.0
Answering = Callable[[Planned], bytes]


@asynccontextmanager
async def server(answering: Answering) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Answers each request; closes after an empty answer. Gives its port, and an event after enough requests."""
    served, enough = 0, asyncio.Event()
    clients: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        clients.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                given = answering(Planned("", "", body, Requests(1).short().check))
                served += 1
                if served >= ENOUGH:
                    enough.set()
                writer.write(given)
                if not given or b"connection: close" in head:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1], enough
    finally:
        listening.close()
        for writer in clients:
            writer.close()


class AfterLooks(asyncio.Event):
    """Set once it has been looked at so often."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def is_set(self) -> bool:
        self._looks -= 1
        return self._looks < 0


async def loaded(port: int, enough: asyncio.Event, file: Path) -> list[Sent]:
    options = LoadOptions(port, 100.0, 2.0, 0.2, 1, str(file))
    with file.open("wb") as out:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await Load(options, out).run(enough)
    return read(file)


async def test_answered_requests_have_no_error_and_their_usage(tmp_path: Path) -> None:
    async with server(answer) as (port, enough):
        sent = await loaded(port, enough, tmp_path / "load.jsonl")
    assert len(sent) >= ENOUGH
    assert {each.error for each in sent} == {""}
    assert {each.prompt_tokens for each in sent if each.kind == "chat"} == {50}
    opened = sum(each.connect_seconds is not None for each in sent)
    assert 0 < opened < len(sent)
    assert all(each.due <= each.begun <= each.ended for each in sent)


async def test_a_connection_that_is_closed_is_a_failure(tmp_path: Path) -> None:
    async with server(lambda _: b"") as (port, enough):
        sent = await loaded(port, enough, tmp_path / "load.jsonl")
    assert {each.error for each in sent} == {"closed without an answer, on a new connection"}


async def test_a_port_without_server_is_a_failure(tmp_path: Path) -> None:
    async with server(answer) as (port, _):
        pass
    sent = await loaded(port, AfterLooks(ENOUGH), tmp_path / "load.jsonl")
    assert sent
    assert all(each.error.startswith("cannot connect: ") for each in sent)
