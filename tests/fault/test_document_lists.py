"""Long lists of documents on real sockets: replicas that die, lie or hang, and clients that leave."""

import asyncio
import re
from typing import TYPE_CHECKING, Any

import orjson

from tests.clients import Client, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import ScriptedBackend
from tests.scripts import hang, reset, whole
from tests.unit.embeddings import rerank_engine as engine

if TYPE_CHECKING:
    from tests.scripted import Connection

PATH = b"/v1/rerank"
DOCUMENTS = [f"document {number}" for number in range(300)]


class Ranks:
    """A step that answers as an engine does, unless it has to change its answer to some document's piece."""

    def __init__(self, lie: tuple[bytes, bytes] | None = None, about: str = "") -> None:
        self.lie, self.about = lie, about

    async def __call__(self, connection: "Connection") -> None:
        assert connection.seen is not None
        body = orjson.loads(connection.seen.body)
        name = (connection.seen.header(b"x-request-id") or b"").decode()
        await asyncio.sleep(0.01)
        status, answer = engine.answer(body, name, "cross")
        if self.lie is not None and self.about in body["documents"]:
            answer = re.sub(*self.lie, answer)
        connection.send(whole(status, answer))


def body(documents: list[str], **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "query": "q", "documents": documents, **fields}


async def warm(under_test: UnderTest, *backends: ScriptedBackend) -> None:
    """Have the gateway learn how the model counts, so that what follows begins with pieces."""
    await under_test.ask(orjson.dumps(body(DOCUMENTS[:100])), target=PATH)
    for backend in backends:
        backend.ledger.clear()


async def test_a_replica_that_dies_midway_costs_nothing(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    for each in (backend, other):
        each.plays(Ranks())
    async with running(backend, other) as under_test:
        await warm(under_test, backend, other)
        other.plays_once(reset())
        asked = body(DOCUMENTS, top_n=9)
        answer = await under_test.ask(orjson.dumps(asked), b"x-request-id: mine", target=PATH)
        assert answer.json == orjson.loads(engine.answer(asked, "mine", "cross")[1])
        assert backend.ledger
        assert other.ledger
        assert under_test.outcomes == {"completed": 2}


async def test_a_replica_that_answers_for_other_documents_is_not_believed(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    for each in (backend, other):
        each.plays(Ranks((rb'"index":0,', b'"index":1,'), about=DOCUMENTS[0]))
    async with running(backend, other) as under_test:
        await warm(under_test)
        answer = await under_test.ask(orjson.dumps(body(DOCUMENTS)), target=PATH)
        assert (answer.status, answer.json["error"]["code"]) == (502, "wrong_backend_answer")
        await under_test.comes_to_rest()


async def test_when_one_piece_fails_the_others_are_aborted(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    for each in (backend, other):
        each.plays(Ranks())
    async with running(backend, other) as under_test:
        await warm(under_test, backend, other)
        other.plays(hang())
        backend.plays(fails)
        answer = await under_test.ask(orjson.dumps(body(DOCUMENTS)), target=PATH)
        assert answer.status == 500
        await holds(lambda: all(seen.peer_left_at is not None for seen in other.ledger), "the rest is aborted")
        assert other.ledger
        await under_test.comes_to_rest()


async def fails(connection: "Connection") -> None:
    """An engine that fails on a request."""
    await asyncio.sleep(0.01)
    connection.send(whole(500, orjson.dumps({"error": {"message": "failed", "code": 500}})))


async def test_a_client_that_leaves_takes_all_pieces_with_it(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    for each in (backend, other):
        each.plays(Ranks())
    async with running(backend, other) as under_test:
        await warm(under_test, backend, other)
        for each in (backend, other):
            each.plays(hang())
        client: Client = await under_test.client()
        await client.send(request(orjson.dumps(body(DOCUMENTS)), target=PATH))
        await holds(lambda: len(backend.ledger) > 1 and len(other.ledger) > 1, "pieces are at both")
        client.close()
        await holds(
            lambda: all(seen.peer_left_at is not None for seen in [*backend.ledger, *other.ledger]),
            "both see the disconnect",
        )
        await under_test.comes_to_rest()
        assert under_test.outcomes == {"completed": 1, "client_gone": 1}


async def test_a_bad_document_gets_the_error_of_the_whole_request(backend: ScriptedBackend) -> None:
    backend.plays(Ranks())
    async with running(backend) as under_test:
        answer = await under_test.ask(orjson.dumps(body([*DOCUMENTS, engine.BAD])), target=PATH)
        assert (answer.status, answer.json["error"]["message"]) == (400, "bad among 301")
        assert under_test.outcomes == {"refused_by_backend": 1}
