"""Batches beside clients: their lines use what is idle, give it back at once, and lose nothing by that."""

import asyncio
from pathlib import Path
from typing import Any

import orjson

from tests.clients import chat
from tests.fault.rig import UnderTest, holds, running
from tests.fault.test_batch_storage import CHAT, FILES, FORM, ended, form, get, lines
from tests.scripted import ScriptedBackend
from tests.scripts import echo, hang, json_answer, until

CAP = 2


def sections(folder: Path, **batches: Any) -> dict[str, dict[str, Any]]:
    return {"batches": {"path": str(folder), **batches}, "admission": {"itl_objective_seconds": 100}}


async def submit(gateway: UnderTest, count: int, window: str = "24h") -> dict[str, Any]:
    """Start a batch with so many lines."""
    file = (await gateway.ask(form(lines(count)), FORM, target=FILES)).json["id"]
    wanted = {"input_file_id": file, "endpoint": CHAT, "completion_window": window}
    created: dict[str, Any] = (await gateway.ask(orjson.dumps(wanted), target=b"/v1/batches")).json
    return created


def lines_by_state(gateway: UnderTest) -> dict[str, float]:
    lines = next(each for each in gateway.gateway.core.metrics if each.name == "gateway_batch_lines_total")
    return {labels[0]: count for labels, count in lines.read()}


async def test_a_client_gets_the_slot_of_a_line_which_runs_again_later(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    for _ in range(CAP):
        backend.plays_once(hang())
    backend.plays(until(go_on), *echo())
    async with running(backend, sections=sections(tmp_path), per_backend={"max_in_flight": CAP}) as gateway:
        batch = await submit(gateway, 10)
        await holds(lambda: backend.running == CAP, "lines have all slots")
        clients = [asyncio.create_task(gateway.ask(chat())) for _ in range(CAP)]
        await holds(lambda: len(backend.ledger) == 2 * CAP, "the clients have them")
        go_on.set()
        assert [(await client).status for client in clients] == [200] * CAP
        found = await ended(gateway, batch)
        assert found["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
        output = (await get(gateway, f"/v1/files/{found['output_file_id']}/content")).splitlines()
        assert sorted(orjson.loads(line)["custom_id"] for line in output) == sorted(map(str, range(10)))
        assert lines_by_state(gateway)["paused"] >= CAP
        gateway.counted.accepted += 10 + int(lines_by_state(gateway)["paused"])
    assert gateway.outcomes["paused"] == lines_by_state(gateway)["paused"]
    assert "retried" not in lines_by_state(gateway)


async def test_a_batch_that_runs_out_of_time_says_that_it_is_promoted(backend: ScriptedBackend, tmp_path: Path) -> None:
    go_on = asyncio.Event()
    backend.plays(until(go_on), *echo())
    async with running(backend, sections=sections(tmp_path)) as gateway:
        batch = await submit(gateway, 3, "20m")
        gateway.counted.accepted += 3
        await holds(lambda: backend.running > 0, "lines run")
        assert (await get(gateway, f"/v1/batches/{batch['id']}"))["promoted"] == "batch"
        assert gateway.gateway.features["batches"].batches is not None
        assert gateway.gateway.features["batches"].batches.runner.promoted() == {"batch": 1}
        go_on.set()
        found = await ended(gateway, batch)
        assert found["status"] == "completed"
        assert "promoted" not in found
    [promoted] = [event for event in gateway.events if event["event"] == "batch_promoted"]
    assert (promoted["batch"], promoted["uses"]) == (batch["id"], "batch")


async def test_lines_wait_while_clients_use_all(backend: ScriptedBackend, tmp_path: Path) -> None:
    go_on = asyncio.Event()
    backend.plays_once(until(go_on), *json_answer())
    backend.plays(*echo())
    async with running(backend, sections=sections(tmp_path), per_backend={"max_in_flight": 1}) as gateway:
        client = asyncio.create_task(gateway.ask(chat()))
        await holds(lambda: backend.running == 1, "the client's request runs")
        batch = await submit(gateway, 5)
        gateway.counted.accepted += 5
        offline = gateway.gateway.features["batches"].offline
        await holds(lambda: len(offline) == 5, "lines wait")
        assert len(gateway.gateway.core.queue) == 0
        go_on.set()
        assert (await client).status == 200
        found = await ended(gateway, batch)
        assert found["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert "paused" not in lines_by_state(gateway)


async def test_without_idle_only_lines_wait_in_the_queue(backend: ScriptedBackend, tmp_path: Path) -> None:
    go_on = asyncio.Event()
    backend.plays_once(until(go_on), *json_answer())
    backend.plays(*echo())
    made = sections(tmp_path, idle_only=False)
    async with running(backend, sections=made, per_backend={"max_in_flight": 1}) as gateway:
        client = asyncio.create_task(gateway.ask(chat()))
        await holds(lambda: backend.running == 1, "the client's request runs")
        batch = await submit(gateway, 5)
        gateway.counted.accepted += 5
        await holds(lambda: len(gateway.gateway.core.queue) == 5, "lines wait")
        assert not gateway.gateway.features["batches"].offline
        go_on.set()
        assert (await client).status == 200
        assert (await ended(gateway, batch))["status"] == "completed"
