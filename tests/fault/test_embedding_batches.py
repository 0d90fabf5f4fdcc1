"""Batches of embeddings on real sockets: replicas that die, clients that leave, inputs that are refused."""

import asyncio
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tests.clients import Answer, Client, request
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import hang, reset, whole

if TYPE_CHECKING:
    from tests.scripted import Connection

PATH = b"/v1/embeddings"
BAD = "bad"


def vector(text: str, dimensions: int = 4) -> bytes:
    """What engines make of a text."""
    return np.full(dimensions, sum(text.encode()) + len(text) / 256, "<f4").tobytes()


class Embeds:
    """A step that answers as an engine does."""

    def __init__(self, dimensions: int = 4) -> None:
        self.dimensions = dimensions
        self.batches: list[list[str]] = []

    async def __call__(self, connection: "Connection") -> None:
        assert connection.seen is not None
        given = orjson.loads(connection.seen.body)["input"]
        texts = [given] if isinstance(given, str) else given
        self.batches.append(texts)
        await asyncio.sleep(0.01)
        if BAD in texts:
            connection.send(whole(400, orjson.dumps({"error": {"message": f"bad among {len(texts)}", "code": 400}})))
            return
        data = [
            {"index": index, "object": "embedding", "embedding": b64encode(vector(text, self.dimensions)).decode()}
            for index, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts), "completion_tokens": 0}
        document = {"id": "embd-x", "object": "list", "created": 1, "model": MODEL, "data": data, "usage": usage}
        connection.send(whole(200, orjson.dumps(document)))


def body(given: Any, encoding: str = "float") -> bytes:
    return orjson.dumps({"model": MODEL, "input": given, "encoding_format": encoding})


def vectors(answer: Answer) -> list[bytes]:
    return [np.array(entry["embedding"], "<f4").tobytes() for entry in answer.json["data"]]


async def ask_all(under_test: UnderTest, *texts: str) -> list[Answer]:
    """Send all requests at the same time."""
    return list(await asyncio.gather(*(under_test.ask(body(text), target=PATH) for text in texts)))


async def test_a_replica_that_dies_of_a_batch_costs_no_client_its_answer(
    backend: ScriptedBackend, other: ScriptedBackend
) -> None:
    step = Embeds()
    for each in (backend, other):
        each.plays(step)
    async with running(backend, other) as under_test:
        backend.plays_once(reset())
        texts = [f"text {number}" for number in range(32)]
        answers = await ask_all(under_test, *texts)
        assert [answer.status for answer in answers] == [200] * 32
        for text, answer in zip(texts, answers, strict=True):
            assert vectors(answer) == [vector(text)]
        assert under_test.outcomes == {"completed": 32}
        assert len(backend.ledger) + len(other.ledger) < 32


async def test_a_long_list_survives_the_death_of_a_replica(backend: ScriptedBackend, other: ScriptedBackend) -> None:
    step = Embeds()
    for each in (backend, other):
        each.plays(step)
    async with running(backend, other) as under_test:
        other.plays_once(reset())
        texts = [f"text {number}" for number in range(500)]
        answer = await under_test.ask(body(texts), target=PATH)
        assert vectors(answer) == [vector(text) for text in texts]
        assert answer.json["usage"]["prompt_tokens"] == 500
        assert backend.ledger
        assert other.ledger


async def test_a_bad_input_fails_its_own_client_only(backend: ScriptedBackend) -> None:
    backend.plays(Embeds())
    async with running(backend) as under_test:
        answers = await ask_all(under_test, *(f"text {number}" for number in range(15)), BAD)
        assert [answer.status for answer in answers] == [200] * 15 + [400]
        assert answers[-1].json["error"]["message"] == "bad among 1"
        assert under_test.outcomes == {"completed": 15, "refused_by_backend": 1}


async def test_an_answer_too_long_to_be_held_is_shared_out_all_the_same(backend: ScriptedBackend) -> None:
    dimensions = 65536
    step = Embeds(dimensions)
    backend.plays(step)
    async with running(backend, sections={"embeddings": {"max_delay_seconds": 0.5}}) as under_test:
        texts = [f"text {number}" for number in range(24)]
        answers = await ask_all(under_test, *texts)
        for text, answer in zip(texts, answers, strict=True):
            assert vectors(answer) == [vector(text, dimensions)]
        assert max(map(len, step.batches)) * len(vector("", dimensions)) > 1048576


async def test_a_batch_is_aborted_when_the_last_of_its_clients_has_left(backend: ScriptedBackend) -> None:
    backend.plays(hang())
    async with running(backend) as under_test:
        clients: list[Client] = [await under_test.client() for _ in range(6)]
        for number, client in enumerate(clients):
            await client.send(request(body(f"text {number}"), target=PATH))
        await holds(lambda: sum(map(asked, backend.ledger)) == 6, "all have been sent")
        for client in clients[1:]:
            client.close()
        await holds(lambda: under_test.outcomes == {"client_gone": 5}, "five have left")
        mine = next(seen for seen in backend.ledger if b"text 0" in seen.body)
        assert mine.peer_left_at is None
        clients[0].close()
        await holds(lambda: mine.peer_left_at is not None, "the backend sees the disconnect")
        await under_test.comes_to_rest()


def asked(seen: Any) -> int:
    """How many texts a request held."""
    return len(orjson.loads(seen.body)["input"]) if seen.whole else 0


async def test_requests_that_wait_for_a_batch_and_those_in_the_queue_are_counted_together(
    backend: ScriptedBackend,
) -> None:
    backend.plays(hang())
    sections = {"admission": {"max_queued_requests": 2}, "embeddings": {"max_delay_seconds": 60.0}}
    async with running(backend, sections=sections, per_backend={"max_in_flight": 4}) as under_test:
        clients: list[Client] = [await under_test.client() for _ in range(6)]
        for number, client in enumerate(clients):
            await client.send(request(body(f"text {number}"), target=PATH))
            if number < 4:  # the most batches that a replica gets at once
                await holds(lambda sent=number: len(backend.ledger) > sent, "it is under way")
        backlog = under_test.gateway.core.queue.backlog
        await holds(lambda: backlog.requests == 2, "two wait for a batch")
        refused = await under_test.ask()
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert "2 requests are waiting" in refused.error["message"]
        refused = await under_test.ask(body("one more"), target=PATH)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        for client in clients:
            client.close()
