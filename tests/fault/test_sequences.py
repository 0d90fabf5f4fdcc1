"""An engine never runs more sequences that generate than its cap, whatever kinds of requests are on their way."""

import asyncio
from typing import Any

import orjson
import pytest

from tests.fault.rig import running
from tests.scripted import MODEL, Connection, ScriptedBackend
from tests.scripts import answer

CAP = 8
TURNS = [{"role": "user", "content": "Hello."}]
KINDS: list[tuple[bytes, dict[str, Any], int]] = [
    (b"/v1/chat/completions", {"messages": TURNS}, 1),
    (b"/v1/chat/completions", {"messages": TURNS, "n": 3}, 3),
    (b"/v1/chat/completions/batch", {"messages": [TURNS] * 3, "n": 2}, 6),
    (b"/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, 6),
    (b"/v1/completions", {"prompt": [[1, 2], [3]], "best_of": 2}, 4),
    (b"/generative_scoring", {"query": "a", "items": ["b"] * 7, "label_token_ids": [1]}, 7),
    (b"/v1/responses", {"input": "a", "store": False}, 1),
    (b"/v1/messages", {"messages": TURNS, "max_tokens": 9}, 1),
]
BEYOND: list[tuple[bytes, dict[str, Any]]] = [
    (b"/v1/chat/completions", {"messages": TURNS, "n": 9}),
    (b"/v1/chat/completions/batch", {"messages": [TURNS] * 5, "n": 2}),
    (b"/v1/completions", {"prompt": ["a"] * 9}),
    (b"/generative_scoring", {"query": "a", "items": ["b"] * 30, "label_token_ids": [1]}),
]


async def test_requests_of_all_kinds_together_keep_to_the_cap(backend: ScriptedBackend) -> None:
    now = most = 0

    async def run(connection: Connection) -> None:
        nonlocal now, most
        assert connection.seen is not None
        body = orjson.loads(connection.seen.body)
        now += body["user_sequences"]
        most = max(most, now)
        for _ in range(20):  # until others have come as well
            await asyncio.sleep(0)
        now -= body["user_sequences"]

    backend.plays(run, *answer(200, {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}))
    async with running(backend, per_backend={"max_in_flight": CAP}) as under_test:
        asked = [
            under_test.ask(orjson.dumps({"model": MODEL, "user_sequences": count} | body), target=path)
            for path, body, count in KINDS * 4
        ]
        answers = await asyncio.gather(*asked)
        assert {each.status for each in answers} == {200}
    assert (now, most) == (0, CAP)


@pytest.mark.parametrize(("path", "body"), BEYOND)
async def test_more_than_the_cap_never_reach_it(backend: ScriptedBackend, path: bytes, body: dict[str, Any]) -> None:
    async with running(backend, per_backend={"max_in_flight": CAP}) as under_test:
        found = await under_test.ask(orjson.dumps({"model": MODEL} | body), target=path)
        assert found.status == 400
        assert f"the limit of the backends for model 'scripted' is {CAP}" in found.error["message"]
        assert backend.ledger == []
