"""Backends whose answers to batches and pieces are too long or wrong: no client gets a wrong vector."""

import asyncio
from base64 import b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from tests.clients import Answer
from tests.fault.rig import UnderTest, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import Step, drained, head, whole
from tests.unit.embeddings import rerank_engine as engine

if TYPE_CHECKING:
    from tests.scripted import Connection

EMBEDDINGS, RERANK = b"/v1/embeddings", b"/v1/rerank"
MIB = 1048576
TEXTS = ["one", "two", "three"]
Document = dict[str, Any]


def endless() -> tuple[Step, ...]:
    """400 MB of an answer, as fast as they are taken."""
    return head(200, kind=b"application/json"), drained(b"%x\r\n%b\r\n" % (MIB, b"x" * MIB), times=400)


def asked(given: Any) -> bytes:
    return orjson.dumps({"model": MODEL, "input": given, "encoding_format": "float"})


async def test_a_batch_whose_answer_does_not_end_is_aborted(backend: ScriptedBackend) -> None:
    backend.plays(*endless())
    async with running(backend) as under_test:
        answer = await under_test.ask(asked(TEXTS), target=EMBEDDINGS)
        assert (answer.status, answer.error["code"]) == (502, "wrong_backend_answer")
        assert f"limit of {MIB + 3 * MIB // 2} bytes" in answer.error["message"]
        await holds(lambda: backend.ledger[0].peer_left_at is not None, "the backend sees the disconnect")
        assert not backend.ledger[0].played
        assert len(backend.ledger) == 1  # and no other backend is asked for the same
        assert under_test.state(backend) == "up"
        await under_test.comes_to_rest()


async def test_a_list_one_of_whose_pieces_is_answered_without_end_is_aborted(backend: ScriptedBackend) -> None:
    async def ranks(connection: "Connection") -> None:
        assert connection.seen is not None
        body = orjson.loads(connection.seen.body)
        if "endless" in body["documents"]:
            for step in endless():
                await step(connection)
        else:
            connection.send(whole(*engine.answer(body, "x", "cross")))

    backend.plays(ranks)
    async with running(backend) as under_test:
        body = {"model": MODEL, "query": "q", "documents": ["d"] * 300 + ["endless"]}
        answer = await under_test.ask(orjson.dumps(body), target=RERANK)
        assert (answer.status, answer.error["code"]) == (502, "wrong_backend_answer")
        await holds(lambda: backend.running == 0, "the backend sees the disconnect")
        await under_test.comes_to_rest()


async def test_answers_beyond_the_memory_budget_are_refused_and_given_back(backend: ScriptedBackend) -> None:
    backend.plays(*endless())
    sections = {"server": {"memory_budget_bytes": MIB}}
    async with running(backend, sections=sections) as under_test:
        answer = await under_test.ask(asked(TEXTS), target=EMBEDDINGS)
        assert (answer.status, answer.error["code"]) == (503, "memory_budget_exceeded")
        await under_test.comes_to_rest()


def vector(text: str) -> list[float]:
    return [float(len(text)), float(sum(text.encode()))]


def right(texts: list[str]) -> Document:
    """What an engine answers."""
    vectors = [b64encode(np.array(vector(text), "<f4").tobytes()).decode() for text in texts]
    data = [{"index": index, "object": "embedding", "embedding": each} for index, each in enumerate(vectors)]
    usage = {"prompt_tokens": 9, "total_tokens": 9}
    return {"id": "embd-x", "object": "list", "created": 1, "model": MODEL, "data": data, "usage": usage}


def entry(number: int = 1, **fields: Any) -> Callable[[Document], Any]:
    def lie(document: Document) -> Any:
        document["data"][number] |= fields
        return document

    return lie


def top(**fields: Any) -> Callable[[Document], Any]:
    return lambda document: {name: value for name, value in (document | fields).items() if value != "gone"}


WRONG: dict[str, Callable[[Document], Any]] = {
    "fewer": lambda document: document | {"data": document["data"][:2]},
    "more": lambda document: document | {"data": [*document["data"], document["data"][0] | {"index": 3}]},
    "an index twice": entry(index=0),
    "an index that is true": entry(index=True),
    "an index that is a fraction": entry(index=1.0),
    "an index that is text": entry(index="1"),
    "a negative index": entry(index=-2),
    "an index beyond": entry(index=3),
    "no index": entry(index=None),
    "a vector that is null": entry(embedding=None),
    "an empty vector": entry(embedding=[]),
    "an empty text": entry(embedding=""),
    "a number": entry(embedding=1.5),
    "vectors of two kinds": entry(embedding=[1.0, 2.0]),
    "vectors of two sizes": entry(embedding="AAAA"),
    "entries that are lists": lambda document: document | {"data": [[1.0]] * 3},
    "entries that are null": top(data=[None] * 3),
    "no data": top(data="gone"),
    "data that is null": top(data=None),
    "data that is empty": top(data=[]),
    "data that is an object": top(data={"0": 1}),
    "no usage": top(usage="gone"),
    "usage that is null": top(usage=None),
    "usage of minus one": top(usage={"prompt_tokens": -1}),
    "usage that is true": top(usage={"prompt_tokens": True}),
    "null": lambda _: None,
    "a list": lambda document: document["data"],
}
WORSE: dict[str, Callable[[bytes], bytes]] = {
    "not a number": lambda body: body.replace(b'"embedding":"', b'"embedding":[NaN],"was":"', 1),
    "infinite": lambda body: body.replace(b'"embedding":"', b'"embedding":[1e999],"was":"'),
    "base64 that is none": lambda body: body.replace(b'"embedding":"', b'"embedding":"*'),
    "base64 of three bytes": lambda body: body.replace(b'"embedding":"', b'"embedding":"AAAA","was":"'),
    "numbers that are text": lambda body: body.replace(b'"embedding":"', b'"embedding":["a"],"was":"'),
    "numbers in lists": lambda body: body.replace(b'"embedding":"', b'"embedding":[[[1]]],"was":"'),
    "half an answer": lambda body: body[: len(body) // 2],
    "nothing": lambda _: b"",
    "two answers": lambda body: body + body,
    "bytes": lambda _: b"\xff\xfe\x00",
}


async def answer_to(backend: ScriptedBackend, change: Callable[[bytes], bytes]) -> tuple[Answer, Answer]:
    """What a client hears if the answer to its request is changed so, and what another hears meanwhile."""

    async def step(connection: "Connection") -> None:
        assert connection.seen is not None
        texts = orjson.loads(connection.seen.body)["input"]
        body = orjson.dumps(right(texts))
        connection.send(whole(200, change(body) if texts == TEXTS else body))

    backend.plays(step)
    async with running(backend) as under_test:
        mine = await under_test.ask(asked(TEXTS), target=EMBEDDINGS)
        other = await under_test.ask(asked(["other", "text"]), target=EMBEDDINGS)
        return mine, other


@pytest.mark.parametrize("lie", WRONG.values(), ids=WRONG)
async def test_an_answer_to_something_else_is_a_502(backend: ScriptedBackend, lie: Callable[[Document], Any]) -> None:
    mine, other = await answer_to(backend, lambda body: orjson.dumps(lie(orjson.loads(body))))
    assert (mine.status, mine.error["code"]) == (502, "wrong_backend_answer")
    assert [each["embedding"] for each in other.json["data"]] == [vector("other"), vector("text")]


@pytest.mark.parametrize("change", WORSE.values(), ids=WORSE)
async def test_an_answer_that_holds_no_vectors_is_a_502(
    backend: ScriptedBackend, change: Callable[[bytes], bytes]
) -> None:
    mine, other = await answer_to(backend, change)
    assert (mine.status, mine.error["code"]) == (502, "wrong_backend_answer")
    assert other.status == 200


async def test_vectors_that_come_in_another_order_go_to_their_inputs(backend: ScriptedBackend) -> None:
    def reverse(body: bytes) -> bytes:
        document = orjson.loads(body)
        document["data"].reverse()
        return orjson.dumps(document)

    mine, _ = await answer_to(backend, reverse)
    assert [each["embedding"] for each in mine.json["data"]] == [vector(text) for text in TEXTS]
    assert [each["index"] for each in mine.json["data"]] == [0, 1, 2]


async def test_vectors_that_come_as_numbers_are_passed_on(backend: ScriptedBackend) -> None:
    def as_numbers(body: bytes) -> bytes:
        document = orjson.loads(body)
        for each, text in zip(document["data"], TEXTS, strict=True):
            each["embedding"] = vector(text)
        return orjson.dumps(document)

    mine, _ = await answer_to(backend, as_numbers)
    assert [each["embedding"] for each in mine.json["data"]] == [vector(text) for text in TEXTS]


async def test_clients_of_one_batch_hear_of_its_wrong_answer_together(backend: ScriptedBackend) -> None:
    go = asyncio.Event()

    async def step(connection: "Connection") -> None:
        assert connection.seen is not None
        texts = orjson.loads(connection.seen.body)["input"]
        await go.wait()
        connection.send(whole(200, orjson.dumps(right(texts[:-1] if len(texts) > 1 else texts))))

    backend.plays(step)
    sections = {"embeddings": {"max_delay_seconds": 5.0}}
    async with running(backend, sections=sections) as under_test:
        ask = [asyncio.create_task(under_test.ask(asked(f"text {n}"), target=EMBEDDINGS)) for n in range(24)]
        await holds(lambda: len(backend.ledger) >= 1 and waiting(under_test) >= 2, "some are under way, others wait")
        go.set()
        answers = await asyncio.gather(*ask)
        alone = {seen.body for seen in backend.ledger if len(orjson.loads(seen.body)["input"]) == 1}
        assert len(backend.ledger) > len(alone)
        assert sorted({answer.status for answer in answers}) == [200, 502]
        for number, answer in enumerate(answers):
            if answer.status == 200:
                assert answer.json["data"][0]["embedding"] == vector(f"text {number}")


def waiting(under_test: UnderTest) -> int:
    return under_test.gateway.core.queue.backlog.requests
