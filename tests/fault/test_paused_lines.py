"""Lines of a batch that are paused while they are answered: the rest is requested later, if the backend can do that."""

import asyncio
from pathlib import Path
from typing import Any

import orjson

from tests.clients import chat
from tests.fault.rig import UnderTest, holds, running
from tests.fault.test_batch_storage import CHAT, FILES, FORM, ended, form, get
from tests.fault.test_idle_batches import lines_by_state, sections
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import DONE_EVENT, Step, answer, chunk, hang, head, json_answer, last_chunk

PROMPT, LIMIT = [1, 2], 40


async def submit(gateway: UnderTest, **more: Any) -> dict[str, Any]:
    """Start a batch of one line that may be continued."""
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": LIMIT, **more}
    line = orjson.dumps({"custom_id": "0", "method": "POST", "url": CHAT, "body": body})
    file = (await gateway.ask(form(line), FORM, target=FILES)).json["id"]
    wanted = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    created: dict[str, Any] = (await gateway.ask(orjson.dumps(wanted), target=b"/v1/batches")).json
    return created


async def results(gateway: UnderTest, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies of all lines, when the batch has ended."""
    found = await ended(gateway, batch)
    assert found["request_counts"]["failed"] == 0
    output = await get(gateway, f"/v1/files/{found['output_file_id']}/content")
    return [orjson.loads(line)["response"]["body"] for line in output.splitlines()]


def spoken(prompt: list[int], said: dict[int, str], *, ends: bool) -> tuple[Step, ...]:
    """A stream with token ids; one that does not end waits until the gateway closes it."""
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    events = [{"id": "first", "model": MODEL, "choices": [first], "prompt_token_ids": prompt}]
    for number, (token, text) in enumerate(said.items(), 1):
        reason = "stop" if ends and number == len(said) else None
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, "token_ids": [token]}
        events.append({"id": "any", "model": MODEL, "choices": [choice]})
    if not ends:
        return (head(200), *[chunk(b"data: %b\n\n" % orjson.dumps(event)) for event in events], hang())
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said), "total_tokens": len(prompt) + len(said)}
    events.append({"id": "any", "model": MODEL, "choices": [], "usage": usage})
    steps = [chunk(b"data: %b\n\n" % orjson.dumps(event)) for event in events]
    return (head(200), *steps, chunk(DONE_EVENT), last_chunk())


def asked(backend: ScriptedBackend) -> list[dict[str, Any]]:
    """The bodies of all requests, in their order."""
    return [orjson.loads(seen.body) for seen in backend.ledger]


async def a_client_takes_the_slot(gateway: UnderTest, backend: ScriptedBackend) -> None:
    await holds(lambda: backend.running == 1, "the line has the slot")
    await holds(lambda: any(engine.kv.held for engine in held(gateway)), "tokens have come")
    assert (await gateway.ask(chat())).status == 200


def held(gateway: UnderTest) -> list[Any]:
    return [engine for backend in gateway.gateway.core.fleet.backends for engine in backend.all_engines]


async def test_a_line_goes_on_from_the_tokens_that_it_had(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays_once(*spoken(PROMPT, {3: "Hel", 4: "lo", 5: ""}, ends=False))
    backend.plays_once(*json_answer())
    backend.plays_once(*spoken([*PROMPT, 3, 4], {5: "", 6: " you"}, ends=True))
    async with running(backend, sections=sections(tmp_path), per_backend={"max_in_flight": 1}) as gateway:
        batch = await submit(gateway)
        await a_client_takes_the_slot(gateway, backend)
        [body] = await results(gateway, batch)
        gateway.counted.accepted += 2
        assert lines_by_state(gateway) == {"paused": 1, "continued": 1, "completed": 1}
    choice, usage = body["choices"][0], body["usage"]
    assert choice["message"]["content"] == "Hello you"
    assert (choice["finish_reason"], body["object"], body["id"]) == ("stop", "chat.completion", "first")
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 4, 6)
    first, _, rest = asked(backend)
    assert (first["stream"], first["return_token_ids"], first["max_tokens"]) == (True, True, LIMIT)
    assert rest["kv_transfer_params"] == {"prompt_token_ids": [*PROMPT, 3, 4]}
    assert (rest["max_tokens"], rest["messages"]) == (LIMIT - 2, first["messages"])


async def test_a_line_with_more_text_than_is_kept_starts_anew(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays_once(*spoken(PROMPT, dict.fromkeys(range(3, 13), "a" * 1_000_000), ends=False))
    backend.plays_once(*json_answer())
    backend.plays_once(*spoken(PROMPT, {3: "Hel", 4: "lo"}, ends=True))
    async with running(backend, sections=sections(tmp_path), per_backend={"max_in_flight": 1}) as gateway:
        batch = await submit(gateway)
        await holds(lambda: gateway.gateway.core.memory.used_bytes > 10_000_000, "all text has come")
        await a_client_takes_the_slot(gateway, backend)
        [body] = await results(gateway, batch)
        gateway.counted.accepted += 2
        assert lines_by_state(gateway) == {"paused": 1, "completed": 1}
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert "kv_transfer_params" not in asked(backend)[2]


async def test_a_backend_that_ignores_the_tokens_gets_the_line_whole(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays_once(*spoken(PROMPT, {3: "Hel", 4: "lo"}, ends=False))
    backend.plays_once(*json_answer())
    backend.plays_once(*spoken(PROMPT, {3: "Hel", 4: "lo"}, ends=True))
    backend.plays(*json_answer("Hello"))
    async with running(backend, sections=sections(tmp_path), per_backend={"max_in_flight": 1}) as gateway:
        batch = await submit(gateway)
        await a_client_takes_the_slot(gateway, backend)
        bodies = await results(gateway, batch) + await results(gateway, await submit(gateway))
        gateway.counted.accepted += 4
    assert [body["choices"][0]["message"]["content"] for body in bodies] == ["Hello"] * 2
    assert ["stream" in body for body in asked(backend)] == [True, False, True, False, False]


async def test_a_backend_that_refuses_streams_of_tokens_gets_lines_whole(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    backend.plays_once(*answer(400, {"error": {"message": "return_token_ids: unknown field"}}))
    backend.plays(*json_answer("Hello"))
    async with running(backend, sections=sections(tmp_path), per_backend={"max_in_flight": 1}) as gateway:
        bodies = await results(gateway, await submit(gateway)) + await results(gateway, await submit(gateway))
        gateway.counted.accepted += 3
        assert lines_by_state(gateway) == {"completed": 2}
    assert [body["choices"][0]["message"]["content"] for body in bodies] == ["Hello"] * 2
    assert ["stream" in body for body in asked(backend)] == [True, False, False]


async def test_a_line_with_log_probabilities_is_sent_whole(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays(*json_answer("Hello"))
    async with running(backend, sections=sections(tmp_path)) as gateway:
        await results(gateway, await submit(gateway, logprobs=True))
        gateway.counted.accepted += 1
    assert ["stream" in body for body in asked(backend)] == [False]


async def test_a_stream_that_breaks_is_no_answer_and_its_line_is_sent_whole(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    backend.plays_once(*spoken(PROMPT, {3: "Hel"}, ends=False)[:-1], last_chunk())
    backend.plays(*json_answer("Hello"))
    async with running(backend, sections=sections(tmp_path)) as gateway:
        [body] = await results(gateway, await submit(gateway))
        gateway.counted.accepted += 2
        assert lines_by_state(gateway) == {"retried": 1, "completed": 1}
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert ["stream" in body for body in asked(backend)] == [True, False]


async def test_a_paused_line_holds_no_memory_of_requests(backend: ScriptedBackend, tmp_path: Path) -> None:
    backend.plays_once(*spoken(PROMPT, {3: "Hel"}, ends=False))
    go_on = asyncio.Event()

    async def waits(_: Any) -> None:
        await go_on.wait()

    backend.plays_once(waits, *json_answer())
    backend.plays_once(*spoken([*PROMPT, 3], {4: "lo"}, ends=True))
    async with running(backend, sections=sections(tmp_path), per_backend={"max_in_flight": 1}) as gateway:
        batch = await submit(gateway)
        client = asyncio.create_task(a_client_takes_the_slot(gateway, backend))
        await holds(lambda: lines_by_state(gateway).get("paused") == 1, "the line is paused")
        go_on.set()
        await client
        [body] = await results(gateway, batch)
        gateway.counted.accepted += 2
    assert body["choices"][0]["message"]["content"] == "Hello"
