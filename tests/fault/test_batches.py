"""Offline batches while the gateway is killed, replaced, or has no backend; and a second gateway at the same folder."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import yaml
from openai import APIConnectionError, AsyncOpenAI, InternalServerError
from openai.types import Batch

from tests.fault.restartable import Restartable, restartable
from tests.fault.rig import holds
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import allow, answer, echo, one_of, pause, until

KILLS = int(os.environ.get("BATCH_KILLS", "3"))
LINES = 300 * KILLS
IN_FLIGHT = 32
CHAT: Any = "/v1/chat/completions"


def sdk_of(gateway: Restartable) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=10)


def sections(folder: Path, **more: Any) -> dict[str, Any]:
    batches = {"path": str(folder / "batches"), "lines_in_flight": IN_FLIGHT, "idle_only": False}
    return {"batches": batches, "cap": IN_FLIGHT, **more}


async def submit(sdk: AsyncOpenAI, names: Iterable[str], window: Any = "24h") -> Batch:
    """Upload a line for each name, whose message is the name, and start a batch."""
    lines = [
        {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": MODEL, "messages": [
            {"role": "user", "content": name}]}} for name in names
    ]  # fmt: skip
    content = b"\n".join(map(orjson.dumps, lines))
    file = await sdk.files.create(file=("input.jsonl", content), purpose="batch")
    return await sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window)


async def state(sdk: AsyncOpenAI, batch: Batch) -> Batch:
    """The batch as it is now; the gateway may be starting or stopping."""
    while True:
        try:
            return await sdk.batches.retrieve(batch.id)
        except (APIConnectionError, InternalServerError):
            await asyncio.sleep(0.05)


async def reaches(sdk: AsyncOpenAI, batch: Batch, done: int) -> None:
    """Wait until so many lines have an answer."""
    while True:
        counts = (await state(sdk, batch)).request_counts
        if counts is not None and counts.completed >= done:
            return
        await asyncio.sleep(0.01)


async def ended(sdk: AsyncOpenAI, batch: Batch) -> Batch:
    while (batch := await state(sdk, batch)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        await asyncio.sleep(0.05)
    return batch


async def lines_of(sdk: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [orjson.loads(line) for line in (await sdk.files.content(file_id)).content.splitlines()]


async def test_however_often_it_is_killed_no_line_is_lost_and_none_is_there_twice(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    chance = random.Random(7)
    allowed = asyncio.Semaphore(0)
    backend.plays(one_of(allowed), pause(0.002), *echo())
    names = [f"line {number}" for number in range(LINES)]
    async with restartable(tmp_path, backend, **sections(tmp_path)) as gateway, sdk_of(gateway) as sdk:
        batch = await submit(sdk, names)
        for kill in range(KILLS):
            played, more = len(backend.ledger), chance.randrange(200)
            allow(allowed, LINES // KILLS - IN_FLIGHT)
            await holds(lambda n=played + more: len(backend.ledger) > n, "lines run")  # type: ignore[misc]
            await asyncio.sleep(chance.uniform(0, 0.05))
            gateway.processes[-1].send_signal(signal.SIGKILL)
            gateway.processes[-1].wait()
            for torn in (tmp_path / "batches" / "parts").glob("*/*"):
                if chance.random() < 0.5:
                    with torn.open("ab") as file:
                        file.write(b'{"id":"batch_req_torn","custom_id":"line 0","respo'[: chance.randrange(50)])
            gateway.start()
            await gateway.ready()
            assert (await state(sdk, batch)).status in ("in_progress", "finalizing", "completed"), kill
        allow(allowed, LINES * 2)
        batch = await ended(sdk, batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
        assert batch.usage is not None
        assert batch.usage.input_tokens == 5 * LINES
        lines = await lines_of(sdk, batch.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == sorted(names)
        for line in lines:
            assert line["response"]["body"]["choices"][0]["message"]["content"] == line["custom_id"]
    executed = Counter(orjson.loads(seen.body)["messages"][-1]["content"] for seen in backend.ledger if seen.played)
    assert set(executed) == set(names)
    assert executed.total() - LINES <= KILLS * (64 + IN_FLIGHT)


async def test_a_restart_takes_the_batch_along(tmp_path: Path, backend: ScriptedBackend) -> None:
    goes_on = asyncio.Event()
    for _ in range(100):
        backend.plays_once(*echo())
    backend.plays(until(goes_on), *echo())
    names = [f"line {number}" for number in range(600)]
    async with restartable(tmp_path, backend, **sections(tmp_path)) as gateway, sdk_of(gateway) as sdk:
        batch = await submit(sdk, names)
        await reaches(sdk, batch, 100)
        old = gateway.processes[0].pid
        await gateway.restart()
        goes_on.set()
        await gateway.ended(old)
        batch = await ended(sdk, batch)
        assert batch.status == "completed"
        lines = await lines_of(sdk, batch.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == sorted(names)
        while len(gateway.events("batches_opened")) < 2:  # a thread writes the log
            await asyncio.sleep(0.05)
        [opened, resumed] = gateway.events("batches_opened")
        assert (opened["running"], resumed["running"]) == (0, 1)
    assert len([seen for seen in backend.ledger if seen.played]) == len(names)  # what was in flight was aborted


async def test_while_no_backend_is_there_lines_wait_and_none_fails(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*echo())
    quick = sections(tmp_path, admission={"max_wait_seconds": 0.2})
    async with restartable(tmp_path, backend, **quick) as gateway, sdk_of(gateway) as sdk:
        first = await ended(sdk, await submit(sdk, ["a"]))
        assert first.status == "completed"
        await backend.stop()
        batch = await submit(sdk, [str(number) for number in range(100)])
        await asyncio.sleep(1.0)
        assert (await state(sdk, batch)).status == "in_progress"
        await backend.start()
        batch = await ended(sdk, batch)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}


async def test_a_line_at_which_backends_fail_is_tried_three_times(tmp_path: Path, backend: ScriptedBackend) -> None:
    backend.plays(*answer(500, {"error": {"message": "poison", "type": "InternalServerError", "code": 500}}))
    async with restartable(tmp_path, backend, **sections(tmp_path)) as gateway, sdk_of(gateway) as sdk:
        batch = await ended(sdk, await submit(sdk, ["a"]))
        assert batch.status == "completed"
        [line] = await lines_of(sdk, batch.error_file_id)
        assert line["response"]["status_code"] == 500
        assert line["response"]["body"]["error"]["message"] == "poison"
        assert line["error"] is None
    assert len(backend.ledger) == 3


async def test_when_the_window_closes_what_is_done_is_kept(tmp_path: Path, backend: ScriptedBackend) -> None:
    never = asyncio.Event()
    for _ in range(5):
        backend.plays_once(*echo())
    backend.plays(until(never), *echo())
    async with restartable(tmp_path, backend, **sections(tmp_path)) as gateway, sdk_of(gateway) as sdk:
        batch = await submit(sdk, [str(number) for number in range(100)], "1m")
        await holds(lambda: durable_lines(tmp_path) == 5, "the answers are durable")
        gateway.processes[-1].send_signal(signal.SIGKILL)
        gateway.processes[-1].wait()
        rewind(tmp_path / "batches", batch.id, seconds=58)
        gateway.start()
        await gateway.ready()
        batch = await ended(sdk, batch)
        assert (batch.status, batch.expired_at is None) == ("expired", False)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 100, "completed": 5, "failed": 95}
        assert len(await lines_of(sdk, batch.output_file_id)) == 5
        errors = await lines_of(sdk, batch.error_file_id)
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}


async def test_a_batch_that_is_killed_while_it_is_cancelled_ends_cancelled(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    never = asyncio.Event()
    for _ in range(5):
        backend.plays_once(*echo())
    backend.plays(until(never), *echo())
    async with restartable(tmp_path, backend, **sections(tmp_path)) as gateway, sdk_of(gateway) as sdk:
        batch = await submit(sdk, [str(number) for number in range(100)])
        await holds(lambda: durable_lines(tmp_path) == 5, "the answers are durable")
        assert (await sdk.batches.cancel(batch.id)).status == "cancelling"
        gateway.processes[-1].send_signal(signal.SIGKILL)
        gateway.processes[-1].wait()
        gateway.start()
        await gateway.ready()
        batch = await ended(sdk, batch)
        assert batch.status == "cancelled"
        lines = [*await lines_of(sdk, batch.output_file_id), *await lines_of(sdk, batch.error_file_id)]
        assert sorted(int(line["custom_id"]) for line in lines) == [*range(100)]
        assert len(await lines_of(sdk, batch.output_file_id)) == 5


def durable_lines(folder: Path) -> int:
    """Answers on disk."""
    files = [*(folder / "batches" / "parts").glob("*/*")]
    return sum(line.startswith(b'{"id":"batch_req_') for file in files for line in file.read_bytes().splitlines())


def rewind(folder: Path, batch_id: str, seconds: int) -> None:
    """Have the batch's window close earlier."""
    import sqlite3

    tables = sqlite3.connect(folder / "batches.sqlite3")
    [stored] = tables.execute("SELECT batch FROM gateway_batches WHERE id = ?", (batch_id,)).fetchone()
    batch = orjson.loads(stored)
    batch["expires_at"] -= seconds
    tables.execute("UPDATE gateway_batches SET batch = ? WHERE id = ?", (orjson.dumps(batch), batch_id))
    tables.commit()
    tables.close()


async def test_a_second_gateway_at_the_same_folder_does_not_start(tmp_path: Path, backend: ScriptedBackend) -> None:
    async with restartable(tmp_path, backend, **sections(tmp_path)) as gateway:
        document = yaml.safe_load(gateway.file.read_text())
        document["server"] = {"host": "127.0.0.1", "port": 0, "admin": None}
        file = tmp_path / "second.yaml"
        file.write_text(yaml.safe_dump(document))
        command = [sys.executable, "-m", "gateway", "serve", "-c", str(file)]
        second = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
        assert second.returncode == 1
        message = f"batches.path ({tmp_path / 'batches'}) is in use by another gateway"
        assert f"{message} (process {gateway.processes[0].pid})" in second.stderr.decode()
