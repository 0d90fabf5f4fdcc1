"""The requests of a soak: a right answer is taken for one, and another's is not."""

from random import Random

import pytest

from tests.bench.mock_engine import MockEngine
from tests.bench.soak.requests import SHARES, Planned, Requests
from tests.clients import Client

SERVED = {"chat", "stream", "new chat", "new stream", "embeddings", "rerank", "upload"}


def planned_of(kind: str, count: int) -> list[Planned]:
    """The first requests of a kind."""
    requests = Requests(Random(7))
    found = [each for number in range(3000) if (each := requests.make(number)).kind == kind]
    return found[:count]


def test_the_same_seed_makes_the_same_requests() -> None:
    one, same, other = (Requests(Random(seed)) for seed in (1, 1, 2))
    made = [[requests.make(number).data for number in range(50)] for requests in (one, same, other)]
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_every_kind_is_made() -> None:
    requests = Requests(Random(1))
    assert {requests.make(number).kind for number in range(2000)} == set(SHARES)


@pytest.mark.parametrize("kind", sorted(SERVED))
async def test_an_answer_holds_for_its_own_request_only(kind: str) -> None:
    first, second = planned_of(kind, 2)
    async with MockEngine() as engine:
        answers = []
        for planned in (first, second):
            async with await Client.connect(engine.port) as client:
                await client.send(planned.data)
                answer = await client.answer()
                assert answer.complete
                answers.append(answer.head + answer.body)
    assert first.holds(answers[0])
    assert second.holds(answers[1])
    assert not first.holds(answers[1])
